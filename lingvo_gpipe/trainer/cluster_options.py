"""Flags of runs with many processes, and the processes that they ask for."""

import os
import sys

from absl import flags

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import addresses, local, supervisor, worker
from lingvo_gpipe.trainer import checkpoints, reports

FLAGS = flags.FLAGS

flags.DEFINE_integer(
  'local_workers',
  0,
  'Start so many worker processes on this machine, each with its share of the '
  'cores, and put the stages on them.',
  lower_bound=0,
)
flags.DEFINE_list(
  'workers',
  [],
  'Addresses of all workers, in the order of their numbers: host:port,... . '
  'They are started elsewhere, with --job=worker --task=N and the same list.',
)
flags.DEFINE_enum(
  'cluster_resolver',
  None,
  addresses.RESOLVERS,
  'Find the workers in the environment that TF_CONFIG, a step of Slurm or '
  'tools/cluster/kubernetes.yaml sets, in place of --workers.',
)
flags.DEFINE_integer(
  'task', None, 'For --job=worker: the number of this worker.', lower_bound=0
)
flags.DEFINE_bool(
  'public_worker',
  False,
  'For --job=worker: let other machines connect. Nobody is asked for a '
  'password: use it in a network of your own alone.',
)
flags.DEFINE_float(
  'worker_wait',
  60.0,
  'Seconds to wait for workers that do not answer, at the start and after a '
  'loss.',
  lower_bound=1.0,
)
flags.DEFINE_integer(
  'chief_port',
  None,
  'Port at which the trainer listens to workers on other machines; default: '
  'any that is free.',
  lower_bound=1,
  upper_bound=2**16 - 1,
)
flags.DEFINE_enum(
  'on_worker_loss',
  'wait',
  ['wait', 'replan'],
  'When a worker stays away for longer than --worker_wait: wait ends the run; '
  'replan goes on with fewer stages on the workers that are left.',
)
flags.DEFINE_list(
  'chief_of',
  None,
  'Internal: this process is the trainer itself; its workers as task=address.',
)
flags.DEFINE_integer(
  'supervisor',
  None,
  'Internal: process id of the supervisor that started this process.',
)


def serve() -> None:
  """Serves as a worker until it is told to stop."""
  found = _addresses()
  task = FLAGS.task
  if task is None and FLAGS.cluster_resolver:
    task = addresses.task_of(FLAGS.cluster_resolver)
  if task is None:
    raise errors.UserError('--job=worker needs its number: --task=0, 1, ...')
  worker.serve(found, task, FLAGS.public_worker, FLAGS.supervisor)


def wants_cluster() -> bool:
  """Returns whether the flags ask for a run with workers.

  Raises:
    UserError: they ask for several kinds of them.
  """
  asked = [
    flag
    for flag in ('local_workers', 'workers', 'cluster_resolver')
    if FLAGS[flag].value
  ]
  if len(asked) > 1:
    raise errors.UserError(f'Give one of --{" and --".join(asked)}, not both.')
  return bool(asked) and FLAGS.chief_of is None


def workers() -> dict[int, str] | None:
  """Returns the workers of this chief by task, None if it has none."""
  if FLAGS.chief_of is None:
    return None
  pairs = [text.partition('=') for text in FLAGS.chief_of]
  return {int(task): address for task, _, address in pairs}


def supervise() -> int:
  """Runs the trainer on its workers; returns its exit status."""
  if not FLAGS.logdir:
    raise errors.UserError('--logdir is missing: where shall the run be kept?')
  own, found = None, []
  if FLAGS.local_workers:
    own = local.LocalWorkers(
      lambda task, found: _command(
        '--job=worker', f'--task={task}', f'--workers={",".join(found)}'
      ),
      FLAGS.local_workers,
    )
    reports.say(
      f'{FLAGS.local_workers} workers start; their logs: {own.log_folder}'
    )
  else:
    found = _addresses()

  def chief_command(workers):
    pairs = ','.join(f'{task}={address}' for task, address in workers.items())
    return _command(*sys.argv[1:], f'--chief_of={pairs}')

  status = supervisor.Supervisor(
    chief_command,
    found,
    own,
    FLAGS.worker_wait,
    FLAGS.on_worker_loss == 'replan',
    lambda: _progress(FLAGS.logdir),
    reports.say,
  ).run()
  if own and status == 0:
    own.remove_logs()
  return status


def _command(*arguments):
  return [
    *(sys.executable, '-m', 'lingvo_gpipe.trainer'),
    *arguments,
    f'--supervisor={os.getpid()}',
  ]


def _addresses():
  if FLAGS.cluster_resolver:
    return addresses.resolve(FLAGS.cluster_resolver)
  if not FLAGS.workers:
    raise errors.UserError(
      '--job=worker needs the addresses of all workers: --workers=host:port,'
      '..., or --cluster_resolver.'
    )
  return addresses.parse(FLAGS.workers)


def _progress(logdir):
  """Returns the highest step of a run, by its metrics and checkpoints."""
  steps = [checkpoints.step_of(path) for path in checkpoints.paths(logdir)]
  return max([*steps, reports.last_step(logdir, 'metrics')])
