"""Measures the memory that activations take, for each remat and schedule.

    python tools/measure_memory.py [--measured_model=lm.byte_lm.Small]
        [--schedules=gpipe,1f1b] [--remats=none,except_last,full]
        [--stages=4] [--micro_batches=8] [--runs=3]

For each of them a fresh process builds the model, runs forward and backward
once to trace them, gives freed memory back to the system (malloc_trim), and
runs them again. Reported is how far the peak of that run (VmHWM) rises above
what was resident before it, less the bytes of the running gradients, which are
the same for all. TensorFlow's allocator for oneDNN never gives memory back, so
the measurement runs without oneDNN.
"""

import ctypes
import itertools
import json
import re
import statistics

import fresh_process
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string('measured_model', 'lm.byte_lm.Small', 'Which model.')
flags.DEFINE_integer('stages', 4, 'K.')
flags.DEFINE_integer('micro_batches', 8, 'M.')
flags.DEFINE_list('schedules', ['gpipe'], 'Which schedules.')
flags.DEFINE_list('remats', ['none', 'except_last', 'full'], 'Which remats.')
flags.DEFINE_integer('runs', 3, 'How often to measure each.')
flags.DEFINE_list('only', None, 'Schedule and remat to measure once, here.')


def main(unused_argv):
  if FLAGS.only:
    print(json.dumps(_measure(*FLAGS.only)))
    return
  first = None
  for schedule, remat in itertools.product(FLAGS.schedules, FLAGS.remats):
    found = [_measure_in_process(schedule, remat) for _ in range(FLAGS.runs)]
    median = statistics.median(found)
    first = first or median
    print(
      f'{schedule:<12} {remat:<12} activations {median:7.1f} MB, '
      f'{median / first:.2f} of the first '
      f'(runs: {", ".join(f"{mb:.1f}" for mb in found)})',
      flush=True,
    )


def _measure_in_process(schedule, remat):
  return fresh_process.measure(
    __file__,
    [f'--only={schedule},{remat}'],
    ('measured_model', 'stages', 'micro_batches'),
    {'TF_ENABLE_ONEDNN_OPTS': '0'},
  )


def _measure(schedule, remat):
  """Returns the megabytes of activations of one step."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf

    from lingvo_gpipe.trainer import models
  runtime.configure(FLAGS.stages)
  from lingvo import model_registry

  key = models.find(FLAGS.measured_model)
  p = model_registry._ModelRegistryHelper.GetParams(key, 'Train')
  p.task.Set(input=p.input, random_seed=0)
  p.task.pipeline.Set(
    num_stages=FLAGS.stages,
    num_micro_batches=FLAGS.micro_batches,
    remat=remat,
    schedule=schedule,
  )
  task = p.task.Instantiate()
  batch = next(iter(task.input.datasource.GetDataset()))

  @tf.function(autograph=False)
  def run(batch):
    metrics, gradients = task.pipeline.ForwardBackward(
      task.theta.pipeline, (batch.ids,), (batch.labels, batch.weights)
    )
    # Sums stand for the gradients, so that none outlives the step.
    return metrics.loss[0], [tf.reduce_sum(g) for g in gradients.Flatten()]

  run(batch)
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
    file.write('5')  # Forgets the peak so far.
  before = _status('VmRSS')
  float(run(batch)[0])
  rise = _status('VmHWM') - before
  gradients = sum(v.shape.num_elements() * 4 for v in task.vars.Flatten())
  return (rise - gradients) / 1e6


def _status(field):
  """Returns a field of this process's status, in bytes."""
  with open('/proc/self/status', encoding='ascii') as file:
    return int(re.search(rf'{field}:\s+(\d+) kB', file.read()).group(1)) * 1024


if __name__ == '__main__':
  app.run(main)
