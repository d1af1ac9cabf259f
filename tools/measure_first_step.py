"""Measures the time from Params to the end of the first training step.

    python tools/measure_first_step.py [--num_stages=8] [--num_micro_batches=64]

Trains equal Transformer blocks (the embedding and the loss apart) in a fresh
process for each run, and prints how long it takes to build the model, to trace
the step, to run it the first time and again, and the nodes of its graph.
"""

import json
import statistics
import time

import fresh_process
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('num_stages', 8, 'K.')
flags.DEFINE_integer('num_micro_batches', 64, 'M.')
flags.DEFINE_integer('num_layers', 32, 'Transformer blocks.')
flags.DEFINE_integer('batch_size', 64, 'Examples in a mini-batch.')
flags.DEFINE_list('schedules', ['1f1b', 'zb1p'], 'Which schedules.')
flags.DEFINE_string('remat', 'except_last', 'Which activations to recompute.')
flags.DEFINE_integer('runs', 3, 'How often to measure.')
flags.DEFINE_string('only', None, 'Measure this schedule once, here.')


def main(unused_argv):
  if FLAGS.only:
    print(json.dumps(_measure(FLAGS.only)))
    return
  for name in FLAGS.schedules:
    runs = [_measure_in_process(name) for _ in range(FLAGS.runs)]
    medians = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    print(
      f'{name:<12} {medians["total"]:.1f} s from Params to first step (runs: '
      + ', '.join(f'{r["total"]:.1f}' for r in runs)
      + f'): build {medians["build"]:.1f}, trace {medians["trace"]:.1f}, first '
      f'run {medians["first_run"]:.1f}; next step {medians["next_step"]:.2f} s;'
      f' {medians["nodes"]} nodes',
      flush=True,
    )


def _measure_in_process(name):
  sizes = (
    'num_stages',
    'num_micro_batches',
    'num_layers',
    'batch_size',
    'remat',
  )
  return fresh_process.measure(__file__, [f'--only={name}'], sizes)


def _measure(name):
  """Returns seconds by phase, and the nodes of the step's graph."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf
    from lingvo_gpipe.params.lm import byte_lm
  runtime.configure(FLAGS.num_stages)

  class Model(byte_lm.ByteLm):
    NUM_BLOCKS = FLAGS.num_layers
    MODEL_DIM = 128
    NUM_HEADS = 4
    SEQUENCE_LENGTH = 64
    BATCH_SIZE = FLAGS.batch_size

  started = time.monotonic()
  p = Model().Task().Set(input=Model().Train(), random_seed=0)
  p.pipeline.Set(
    num_stages=FLAGS.num_stages,
    num_micro_batches=FLAGS.num_micro_batches,
    schedule=name,
    remat=FLAGS.remat,
  )
  task = p.Instantiate()
  task.CreateSlots()
  batches = iter(task.input.datasource.GetDataset())
  batch = next(batches)
  built = time.monotonic()
  step = tf.function(task.TrainStep, autograph=False)
  graph = step.get_concrete_function(batch).graph
  traced = time.monotonic()
  float(step(batch).loss)
  ran = time.monotonic()
  float(step(next(batches)).loss)
  return {
    'total': ran - started,
    'build': built - started,
    'trace': traced - built,
    'first_run': ran - traced,
    'next_step': time.monotonic() - ran,
    'nodes': len(graph.get_operations()),
  }


if __name__ == '__main__':
  app.run(main)
