"""Where the workers are, as told by a list, a resolver or this machine."""

import importlib.metadata
import os
import re
import socket
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import errors

# The name of workers in a TF_CONFIG.
_WORKER = 'worker'
# The first port of a node of Slurm; its further tasks take those after it.
_SLURM_PORT = 8888
_FAILURES = (
  *(KeyError, ValueError, RuntimeError, TypeError, OSError, AttributeError),
)
_HINTS = {
  'tf_config': 'set TF_CONFIG to JSON such as {"cluster": {"worker": '
  '["host:port", ...]}}',
  'slurm': 'start the command with srun inside an allocation',
  'kubernetes': 'set WORKER_SET to the name of the StatefulSet of workers and '
  'of its headless Service, WORKER_COUNT and WORKER_PORT, as '
  'tools/cluster/kubernetes.yaml does',
}


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
  """Returns the addresses that a resolver finds.

  Raises:
    UserError: it finds none, or its surroundings are not there.
  """
  found = _ask(resolver, _FINDERS[resolver])
  if not found:
    raise errors.UserError(
      f'--cluster_resolver={resolver} finds no workers: {_HINTS[resolver]}.'
    )
  return parse(list(found))


def task_of(resolver: str) -> int | None:
  """Returns the number of this process among the workers, if it is known.

  Raises:
    UserError: the resolver's surroundings are not there.
  """
  return _ask(resolver, _TASKS[resolver])


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


def is_taken(port: int) -> bool:
  """Returns whether somebody on this machine listens at `port`."""
  with socket.socket() as probe:
    return probe.connect_ex(('127.0.0.1', port)) == 0


def _ask(resolver: str, question: Callable):
  try:
    return question()
  except _FAILURES as error:
    raise errors.UserError(
      f'--cluster_resolver={resolver} fails ({error}): {_HINTS[resolver]}.'
    ) from error


def _tf_config():
  return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def _tf_config_workers():
  return _tf_config().cluster_spec().as_dict().get(_WORKER)


def _tf_config_task():
  found = _tf_config()
  return found.task_id if found.task_type == _WORKER else None


def _slurm_workers():
  # With these numbers it asks no nvidia-smi, which may not be there, and gives
  # every task of a node a port.
  found = tf.distribute.cluster_resolver.SlurmClusterResolver(
    port_base=_SLURM_PORT,
    gpus_per_node=int(os.environ['SLURM_STEP_NUM_TASKS']),
    gpus_per_task=1,
    auto_set_gpu=False,
  )
  return found.cluster_spec().as_dict()[_WORKER]


def _slurm_task():
  # The resolver sorts nodes by name, node10 before node2, and so numbers tasks
  # otherwise than Slurm does.
  port = _SLURM_PORT + int(os.environ['SLURM_LOCALID'])
  return _slurm_workers().index(f'{os.environ["SLURMD_NODENAME"]}:{port}')


def _kubernetes_workers():
  # TensorFlow's own resolver reads a kubeconfig, which pods have none of, and
  # gives the addresses of nodes. A pod of a StatefulSet keeps its name.
  name, port = os.environ['WORKER_SET'], os.environ['WORKER_PORT']
  count = int(os.environ['WORKER_COUNT'])
  return [f'{name}-{task}.{name}:{port}' for task in range(count)]


def _kubernetes_task():
  pod = os.environ['HOSTNAME']
  hosts = [address.partition('.')[0] for address in _kubernetes_workers()]
  return hosts.index(pod)


_FINDERS = {
  'tf_config': _tf_config_workers,
  'slurm': _slurm_workers,
  'kubernetes': _kubernetes_workers,
}
_TASKS = {
  'tf_config': _tf_config_task,
  'slurm': _slurm_task,
  'kubernetes': _kubernetes_task,
}
RESOLVERS = tuple(_FINDERS)
