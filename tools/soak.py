"""A long run whose workers are killed again and again.

    python tools/soak.py [--steps=1000] [--kill_every=100]

Trains a small model on two local workers, kills one of them in mid-step every
so many steps, in turn, and at last compares every loss with that of a run that
nobody disturbed. Prints after each kill how much memory the supervisor and the
workers hold: it should not grow.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import processes
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('steps', 1000, 'Steps to train.', lower_bound=1)
flags.DEFINE_integer('kill_every', 100, 'Steps between kills.', lower_bound=4)
flags.DEFINE_string('model', 'lm.gpipe_transformer.TransformerMini', 'Model.')

# Steps before a multiple of kill_every: there are checkpoints at those.
_BEFORE_SAVE = 3


def main(unused_argv):
  with tempfile.TemporaryDirectory() as folder:
    quiet, disturbed = (
      pathlib.Path(folder) / n for n in ('quiet', 'disturbed')
    )
    with _running(quiet) as process:
      if process.wait():
        raise RuntimeError('the undisturbed run failed')
    with _running(disturbed) as process:
      kills = 0
      for step in range(FLAGS.kill_every, FLAGS.steps, FLAGS.kill_every):
        kills += _kill_one(process, disturbed, step - _BEFORE_SAVE, kills)
      status = process.wait()
    same = processes.losses(quiet) == processes.losses(disturbed)
    print(f'{kills} kills, status {status}, losses of all steps equal: {same}')
    sys.exit(status or not same)


def _kill_one(process, logdir, step, turn) -> bool:
  """Kills a worker once the run is at `step`; returns whether there was one."""
  while process.poll() is None:
    workers = processes.children(process.pid, '--job=worker')
    if len(processes.losses(logdir)) >= step and len(workers) == 2:
      break
    time.sleep(0.02)
  else:
    return False
  with contextlib.suppress(ProcessLookupError):
    held = map(processes.resident_bytes, (process.pid, *workers))
    megabytes = ', '.join(f'{h / 1e6:.0f}' for h in held)
    print(
      f'step {step}: resident MB of supervisor and workers: {megabytes}',
      flush=True,
    )
    os.kill(workers[turn % 2], signal.SIGKILL)
    return True
  return False


@contextlib.contextmanager
def _running(logdir):
  process = subprocess.Popen(
    [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=trainer'),
      f'--model={FLAGS.model}',
      f'--logdir={logdir}',
      *('--num_stages=2', '--local_workers=2', '--checkpoint_every=50'),
      f'--max_steps={FLAGS.steps}',
    ],
    stderr=subprocess.DEVNULL,
  )
  try:
    yield process
  finally:
    process.kill()  # Its workers and its trainer end with it.
    process.wait()


if __name__ == '__main__':
  app.run(main)
