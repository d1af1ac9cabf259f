"""Measures runs on worker processes against runs in one process.

    python tools/bench_cluster.py [--what=speed,overhead,memory] [--runs=3]

speed: K = 2 in two workers of one core each, against K = 1 in one process of
one core, 8 blocks of 512 dimensions, M = 32 (at best 64/33 = 1.94 times).

overhead: K = 4 in four workers against four virtual devices in one process, 16
blocks of 128 dimensions, M = 32; all cores for both.

memory: the peak of every worker at K = 4 beyond that of a worker with nothing
to do, as a share of the peak of a trainer at K = 1 beyond that of one that has
only started: weights, slots and activations together.

All run the trainer itself and read its metrics.jsonl.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import processes
from absl import app, flags

from lingvo_gpipe.cluster import addresses, health

FLAGS = flags.FLAGS
flags.DEFINE_list('what', ['speed', 'overhead', 'memory'], 'What to measure.')
flags.DEFINE_integer('runs', 3, 'How often to measure each.')
flags.DEFINE_integer('steps', 8, 'Steps of a run; the first two do not count.')
flags.DEFINE_string('remat', 'none', 'For all runs.')

_ONE_CORE = ('taskset', '-c', '0')


def main(unused_argv):
  measures = {'speed': _speed, 'overhead': _overhead, 'memory': _memory}
  for what in FLAGS.what:
    measures[what]()


def _speed():
  ratios = []
  for _ in range(FLAGS.runs):
    alone, _ = _run('Wide', 1, prefix=_ONE_CORE)
    workers, _ = _run('Wide', 2, workers=2)
    ratios.append(alone / workers)
    _tell('speed', f'K=1 {alone:.3f} s, K=2 {workers:.3f} s', ratios[-1])
  _tell('speed, median', f'remat {FLAGS.remat}', statistics.median(ratios))


def _overhead():
  ratios = []
  for _ in range(FLAGS.runs):
    devices, _ = _run('Narrow', 4)
    workers, _ = _run('Narrow', 4, workers=4)
    ratios.append(devices / workers)
    _tell(
      'overhead',
      f'one process {devices:.3f} s, four workers {workers:.3f} s',
      ratios[-1],
    )
  _tell('overhead, median', 'speed of workers', statistics.median(ratios))


def _memory():
  idle_trainer, idle_worker = _idle_trainer(), _idle_worker()
  for _ in range(FLAGS.runs):
    _, [alone] = _run('Wide', 1)
    _, peaks = _run('Wide', 4, workers=4)
    alone -= idle_trainer
    grown = [peak - idle_worker for peak in peaks]
    shares = [g / alone for g in grown]
    each = ', '.join(f'{g / 1e6:.0f}' for g in grown)
    _tell('memory', f'K=1 {alone / 1e6:.0f} MB; workers {each} MB', max(shares))


def _tell(what, text, ratio):
  print(f'{what:<18} {text:<56} {ratio:.2f}', flush=True)


def _run(model, num_stages, workers=0, prefix=()):
  """Trains; returns seconds of a step, and peaks of memory in bytes.

  The peaks are those of the workers if there are any, else of the trainer.
  """
  with tempfile.TemporaryDirectory() as logdir:
    command = [
      *prefix,
      *(sys.executable, '-m', 'lingvo_gpipe.trainer'),
      f'--model=cluster_models.{model}',
      f'--logdir={logdir}',
      f'--num_stages={num_stages}',
      '--num_micro_batches=32',
      f'--remat={FLAGS.remat}',
      f'--max_steps={FLAGS.steps}',
      '--job=trainer',
      f'--local_workers={workers}',
    ]
    tools = str(pathlib.Path(__file__).parent)
    process = subprocess.Popen(
      command,
      env={**os.environ, 'PYTHONPATH': tools},
      stderr=subprocess.DEVNULL,
    )
    peaks = {}
    while process.poll() is None:
      for pid in (
        processes.children(process.pid, '--job=worker')
        if workers
        else [process.pid]
      ):
        with contextlib.suppress(ProcessLookupError):  # It has just ended.
          peaks[pid] = processes.peak_bytes(pid)
      time.sleep(0.1)
    if process.returncode:
      raise RuntimeError(f'{" ".join(command)} failed')
    path = pathlib.Path(logdir) / 'metrics.jsonl'
    rows = [json.loads(r) for r in path.read_text('utf-8').splitlines()]
  seconds = statistics.median(row['step_seconds'] for row in rows[2:])
  return seconds, list(peaks.values())


def _idle_trainer():
  """Returns the peak of a trainer that has only started TensorFlow."""
  code = (
    'from lingvo_gpipe import runtime\n'
    'with runtime.quiet_tensorflow():\n'
    '  from lingvo_gpipe.trainer import main\n'
    'runtime.configure(1)\n'
    'print(flush=True)\n'
    'input()\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    process.stdout.readline()
    peak = processes.peak_bytes(process.pid)
    process.communicate('\n')
  return peak


def _idle_worker():
  """Returns the peak of a worker that nobody has given anything to do."""
  [address] = addresses.free_local(1)
  with subprocess.Popen(
    [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=worker'),
      *('--task=0', f'--workers={address}'),
    ],
    stderr=subprocess.DEVNULL,
  ) as process:
    health.wait_for_all({0: address}, 120)
    peak = processes.peak_bytes(process.pid)
    process.kill()
  return peak


if __name__ == '__main__':
  app.run(main)
