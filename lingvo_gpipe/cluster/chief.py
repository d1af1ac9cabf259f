"""The chief's side: joins the workers and learns their devices."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from lingvo_gpipe import devices
from lingvo_gpipe.cluster import addresses as addresses_lib
from lingvo_gpipe.cluster import health, loopback

# Seconds after which workers forget a chief that is gone, with its variables.
FORGOTTEN_AFTER = 30
# Threads of a worker that start ops. With a single one, which is TensorFlow's
# choice for a worker of one core, nothing is sent while a stage computes.
_INTER_OP_THREADS = 4


def connect(workers: Mapping[int, str], timeout: float) -> list[str]:
  """Makes the workers' devices this process's own; returns their names.

  To be called before TensorFlow has started.

  Args:
    workers: their addresses by task.
    timeout: seconds to wait for them.

  Raises:
    UserError: one does not answer, or is not what it should be.
  """
  statuses = health.wait_for_all(workers, timeout)
  host = _host_seen_by(next(iter(workers.values())))
  port = int(addresses_lib.free_local(1)[0].rpartition(':')[2])
  spec = tf.train.ClusterSpec(
    {addresses_lib.job_name(): dict(workers), devices.CHIEF: [f'{host}:{port}']}
  )
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
  if host.startswith('127.'):
    loopback.restrict(port)
  return [device for status in statuses for device in status.devices]


def stop_with_parent() -> None:
  """Stops this process as by SIGTERM once its supervisor is gone.

  Another supervisor would start another chief in the same logdir.
  """
  parent = os.getppid()

  def watch():
    while os.getppid() == parent:
      time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, daemon=True).start()


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
