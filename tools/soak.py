"""A long run whose workers are killed again and again.

    python tools/soak.py [--steps=1000] [--kill_every=100]

Trains a small model on two local workers, kills one of them in mid-step every
so many steps, in turn, and at last compares every loss with that of a run that
nobody disturbed. Prints after each kill how much memory the supervisor and the
workers hold: it should not grow.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('steps', 1000, 'Steps to train.')
flags.DEFINE_integer('kill_every', 100, 'Steps between two kills.')
flags.DEFINE_string('model', 'lm.gpipe_transformer.TransformerMini', 'Model.')


def main(unused_argv):
  with tempfile.TemporaryDirectory() as folder:
    quiet, disturbed = (
      pathlib.Path(folder) / n for n in ('quiet', 'disturbed')
    )
    if _start(quiet).wait():
      raise RuntimeError('the undisturbed run failed')
    process = _start(disturbed)
    kills = 0
    for step in range(FLAGS.kill_every, FLAGS.steps, FLAGS.kill_every):
      while process.poll() is None and len(_losses(disturbed)) < step:
        time.sleep(0.05)
      workers = _children(process.pid, '--job=worker')
      held = [_resident(pid) for pid in (process.pid, *workers)]
      print(
        f'step {step}: resident MB of supervisor and workers: '
        + ', '.join(f'{h / 1e6:.0f}' for h in held),
        flush=True,
      )
      os.kill(workers[kills % len(workers)], signal.SIGKILL)
      kills += 1
    status = process.wait()
    same = _losses(quiet) == _losses(disturbed)
    print(f'{kills} kills, status {status}, losses of all steps equal: {same}')
    sys.exit(status or not same)


def _start(logdir):
  return subprocess.Popen(
    [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=trainer'),
      f'--model={FLAGS.model}',
      f'--logdir={logdir}',
      *('--num_stages=2', '--local_workers=2', '--checkpoint_every=50'),
      f'--max_steps={FLAGS.steps}',
    ],
    stderr=subprocess.DEVNULL,
  )


def _losses(logdir):
  path = logdir / 'metrics.jsonl'
  if not path.exists():
    return []
  rows = path.read_text('utf-8').split('\n')
  return [json.loads(row)['loss'] for row in rows[:-1]]


def _resident(pid):
  status = pathlib.Path(f'/proc/{pid}/status').read_text('ascii')
  return int(re.search(r'VmRSS:\s+(\d+)', status).group(1)) * 1024


def _children(pid, marker):
  found = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text('ascii')
  return [
    int(child)
    for child in found.split()
    if marker in pathlib.Path(f'/proc/{child}/cmdline').read_text('utf-8')
  ]


if __name__ == '__main__':
  app.run(main)
