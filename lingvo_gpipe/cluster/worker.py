"""A worker: serves its devices to the chief until it is told to stop."""

import os
import signal
import threading
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import addresses as addresses_lib
from lingvo_gpipe.cluster import loopback, parent


def serve(
  addresses: Sequence[str],
  task: int,
  is_public: bool,
  supervisor: int | None = None,
) -> None:
  """Serves until SIGTERM or SIGINT; with a supervisor, until that is gone.

  A supervisor ends its workers itself. Signals to all processes of a run, as
  service managers send them, are not for these: the chief needs them to save.

  Args:
    addresses: of all workers.
    task: which of them this is.
    is_public: whether other machines may connect.
    supervisor: its process id, if one has started this worker.

  Raises:
    UserError: `task` is none of them, or its port is taken.
  """
  if not 0 <= task < len(addresses):
    raise errors.UserError(
      f'--task={task}, but there are {len(addresses)} workers: give 0 to '
      f'{len(addresses) - 1}.'
    )
  stop = threading.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(
      number,
      (lambda *unused: stop.set()) if supervisor is None else signal.SIG_IGN,
    )
  cores = len(os.sched_getaffinity(0))
  config = tf.compat.v1.ConfigProto(
    intra_op_parallelism_threads=cores,
    inter_op_parallelism_threads=max(2, cores),
  )
  job = addresses_lib.job_name()
  port = int(addresses[task].rpartition(':')[2])
  if addresses_lib.is_taken(port):
    raise errors.UserError(
      f'task {task} cannot listen at port {port}, somebody does already: is '
      'the same --task running twice?'
    )
  server = tf.distribute.Server(
    tf.train.ClusterSpec({job: list(addresses)}),
    job_name=job,
    task_index=task,
    protocol='grpc',
    config=config,
  )
  if not is_public:
    loopback.restrict(port)
  while not stop.wait(1.0) and not parent.is_gone(supervisor):
    pass
  del server
  # The server's threads do not end; there is nothing to lose.
  os._exit(0)
