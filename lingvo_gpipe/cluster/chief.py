"""The chief's side: joins the workers and learns their devices."""

import ipaddress
import socket
from collections.abc import Collection, Mapping

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from lingvo_gpipe import devices, errors, runtime
from lingvo_gpipe.cluster import addresses as addresses_lib
from lingvo_gpipe.cluster import health, loopback

# Seconds after which workers forget a chief that is gone, with its variables.
FORGOTTEN_AFTER = 30
# Threads of a worker that start ops. With a single one, which is TensorFlow's
# choice for a worker of one core, nothing is sent while a stage computes.
_INTER_OP_THREADS = 4


def connect(
  workers: Mapping[int, str], timeout: float, port: int | None = None
) -> list[str]:
  """Makes the workers' devices this process's own; returns their names.

  To be called before TensorFlow has started.

  Args:
    workers: their addresses by task.
    timeout: seconds to wait for them.
    port: where this process listens to them; None for any that is free.

  Raises:
    UserError: one does not answer, or is not what it should be; or `port` is
      taken.
  """
  statuses = health.wait_for_all(workers, timeout)
  host = own_host([_host_seen_by(worker) for worker in workers.values()])
  if port is None:
    port = int(addresses_lib.free_local(1)[0].rpartition(':')[2])
  elif addresses_lib.is_taken(port):
    raise errors.UserError(
      f'--chief_port={port}: somebody listens there already; choose another, '
      'or leave it out for any that is free.'
    )
  spec = tf.train.ClusterSpec(
    {addresses_lib.job_name(): dict(workers), devices.CHIEF: [f'{host}:{port}']}
  )
  runtime.prepare()
  # Before that, a definition is only kept for later, with TensorFlow's own ten
  # minutes in place of FORGOTTEN_AFTER, and nobody listens yet.
  context.context().ensure_initialized()
  config = context.context().config
  config.inter_op_parallelism_threads = _INTER_OP_THREADS
  # tf.config.experimental_connect_to_cluster does the same, but has workers on
  # other machines look for the chief on their own, and remember it for long.
  context.context().set_server_def(
    tensorflow_server_pb2.ServerDef(
      cluster=spec.as_cluster_def(),
      job_name=devices.CHIEF,
      task_index=0,
      protocol='grpc',
      default_session_config=config,
    ),
    keep_alive_secs=FORGOTTEN_AFTER,
  )
  if _is_loopback(host):
    loopback.restrict(port)
  return [device for status in statuses for device in status.devices]


def own_host(seen: Collection[str]) -> str:
  """Returns where all workers find this machine.

  Args:
    seen: where each of them does. One on this machine may do so by an address
      that means another machine to the others.
  """
  first, *_ = seen
  return next((host for host in seen if not _is_loopback(host)), first)


def _is_loopback(host):
  address, _, _ = host.strip('[]').partition('%')
  return ipaddress.ip_address(address).is_loopback


def _host_seen_by(worker: str) -> str:
  """Returns the address of this machine on the way to a worker."""
  host, _, port = worker.rpartition(':')
  [(family, kind, _, _, address), *_] = socket.getaddrinfo(
    host.strip('[]'), int(port), type=socket.SOCK_DGRAM
  )
  with socket.socket(family, kind) as probe:
    probe.connect(address)  # Sends nothing.
    found = probe.getsockname()[0]
  return f'[{found}]' if family == socket.AF_INET6 else found
