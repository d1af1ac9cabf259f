"""Where the workers are, as told by a list, a resolver or this machine."""

import importlib.metadata
import re
import socket
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import errors

RESOLVERS = ('tf_config', 'slurm', 'kubernetes')
# The name of workers in a TF_CONFIG.
_WORKER = 'worker'


def job_name() -> str:
  """Returns what a worker calls itself: which versions it runs.

  So a chief that asks for its status learns whether they fit.
  """
  ours = importlib.metadata.version('lingvo_gpipe')
  name = f'gpipe_{ours}_tf_{tf.__version__}'
  return re.sub(r'[^0-9a-z]+', '_', name.lower())


def parse(text: list[str]) -> list[str]:
  """Returns addresses from `host:port` texts.

  Raises:
    UserError: one is no address, or is there twice.
  """
  for address in text:
    host, _, port = address.rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
      raise errors.UserError(
        f'--workers: "{address}" is no address; give host:port, as in '
        'worker-0.example:2222.'
      )
    if text.count(address) > 1:
      raise errors.UserError(
        f'--workers has {address} twice; each worker needs an address of its '
        'own.'
      )
  return text


def resolve(resolver: str) -> list[str]:
  """Returns the addresses that one of TensorFlow's resolvers finds.

  Raises:
    UserError: it finds none, or its surroundings are not there.
  """
  makers: dict[str, Callable] = {
    'tf_config': tf.distribute.cluster_resolver.TFConfigClusterResolver,
    'slurm': _slurm,
    'kubernetes': _kubernetes,
  }
  hints = {
    'tf_config': 'set TF_CONFIG to JSON such as {"cluster": {"worker": '
    '["host:port", ...]}}',
    'slurm': 'start the command with srun inside an allocation',
    'kubernetes': 'run it in a cluster where pods may be listed, with the '
    'workers labelled job-name=worker; pip install kubernetes',
  }
  try:
    spec = makers[resolver]().cluster_spec().as_dict()
    found = spec.get(_WORKER) or []
  except (
    *(ImportError, KeyError, ValueError, RuntimeError, TypeError),
    *(OSError, AttributeError),
  ) as error:
    raise errors.UserError(
      f'--cluster_resolver={resolver} fails ({error}): {hints[resolver]}.'
    ) from error
  if not found:
    raise errors.UserError(
      f'--cluster_resolver={resolver} finds no workers: {hints[resolver]}.'
    )
  return parse(list(found))


def task_of(resolver: str) -> int | None:
  """Returns the number of this process among the workers, if it is known."""
  if resolver == 'tf_config':
    found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return found.task_id if found.task_type == _WORKER else None
  if resolver == 'slurm':
    resolver = _slurm()
    resolver.cluster_spec()  # Which counts the tasks.
    return resolver.task_id
  return None


def free_local(count: int) -> list[str]:
  """Returns addresses on this machine that nobody listens at."""
  sockets = [socket.socket() for _ in range(count)]
  try:
    for s in sockets:
      s.bind(('127.0.0.1', 0))
    return [f'127.0.0.1:{s.getsockname()[1]}' for s in sockets]
  finally:
    for s in sockets:
      s.close()


def _slurm():
  # With these numbers it asks no nvidia-smi, which may not be there.
  return tf.distribute.cluster_resolver.SlurmClusterResolver(
    gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False
  )


def _kubernetes():
  return tf.distribute.cluster_resolver.KubernetesClusterResolver(
    {_WORKER: [f'job-name={_WORKER}']}
  )
