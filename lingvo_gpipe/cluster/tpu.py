"""Cores of a TPU slice, found by TensorFlow's own resolver.

Not run on a TPU yet: what follows the first connection is built as the
documentation of tf.distribute.TPUStrategy says.
"""

import dataclasses
import socket

import tensorflow as tf

from lingvo_gpipe import errors

# Seconds that an address may take to accept a connection.
_PATIENCE = 20.0
# What the resolver calls a TPU of this machine, and TensorFlow its job.
_LOCAL, _LOCAL_JOB = 'local', 'localhost'


@dataclasses.dataclass(frozen=True)
class Slice:
  """A TPU slice that runs one program.

  Attributes:
    strategy: TPUStrategy; all cores are one replica of it.
    devices: name of each core, along a ring through the slice.
  """

  strategy: tf.distribute.TPUStrategy
  devices: tuple[str, ...]


def connect(name: str, num_cores: int) -> Slice:
  """Connects to a slice, and initializes it.

  Args:
    name: of the TPU in Google Cloud, its address (grpc://10.0.0.2:8470), or
      local for the TPU of this machine.
    num_cores: that the program is for.

  Raises:
    UserError: no TPU answers, or it has another number of cores.
  """
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    _check_addresses(resolver)
    if name != _LOCAL:
      tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
  except (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    tf.errors.OpError,
  ) as error:
    reason, *_ = str(error).splitlines() or [type(error).__name__]
    raise errors.UserError(
      f'--tpu={name}: no TPU answers ({reason[:160]}). Give the name of one '
      'that is up, its address as grpc://host:8470, or local on the machine '
      'that has it; without a TPU, --engine=spmd alone runs the same program '
      'on virtual cores.'
    ) from error
  found = topology.num_tasks * topology.num_tpus_per_task
  if found != num_cores:
    raise errors.UserError(
      f'--tpu={name} has {found} cores, and the program is for {num_cores}: '
      f'set num_stages x num_replicas to {found}.'
    )
  assignment = tf.tpu.experimental.DeviceAssignment.build(
    topology, computation_shape=topology.mesh_shape, num_replicas=1
  )
  strategy = tf.distribute.TPUStrategy(
    resolver,
    experimental_device_assignment=assignment,
    experimental_spmd_xla_partitioning=True,
  )
  job = _LOCAL_JOB if name == _LOCAL else resolver.get_job_name()
  return Slice(
    strategy,
    tuple(
      assignment.tpu_device(logical_core=core, job=job)
      for core in range(num_cores)
    ),
  )


def _check_addresses(resolver) -> None:
  """Raises OSError where nobody listens: TensorFlow would wait for long."""
  for addresses in resolver.cluster_spec().as_dict().values():
    for address in addresses:
      host, _, port = address.rpartition(':')
      socket.create_connection((host, int(port)), _PATIENCE).close()
