"""Prints table 1b of GPipe (arXiv 1811.06965) by the TPU compiler.

    python tools/tpu_table.py [--cores=1,4,8,32,128] [--largest]

For each number of v5e cores the training step of the Transformer with d 2048,
ff 8192, 1024 tokens, vocabulary 32k, batch 32, Adam, in bfloat16 on float32
weights, with the layers that are wanted; with --largest also the most that the
compiler accepts. Nothing runs: no TPU is needed.

--what=flat shows how compile time depends on micro-batches and on layers.
"""

import dataclasses
import os
import statistics

from absl import app, flags

from lingvo_gpipe import runtime

with runtime.quiet_tensorflow():
  import tensorflow as tf
  from lingvo_gpipe.params.lm import gpipe_transformer

  from lingvo_gpipe import xla
  from lingvo_gpipe.engine import spmd

FLAGS = flags.FLAGS
flags.DEFINE_list('cores', ['1', '4', '8', '32', '128'], 'Which rows.')
flags.DEFINE_bool('largest', False, 'Also find the largest model.')
flags.DEFINE_list('what', ['table', 'flat'], 'What to show.')
flags.DEFINE_integer('runs', 3, 'How often to compile, for "flat".')

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class _Row:
  """A slice, the layers wanted on it, and those of the paper."""

  topology: str
  wanted: int
  paper: str


_ROWS = {
  1: _Row('v5e:1x1', 16, '13'),
  4: _Row('v5e:2x2', 72, '-'),
  8: _Row('v5e:2x4', 144, '103'),
  32: _Row('v5e:4x8', 608, '415'),
  128: _Row('v5e:8x16', 2432, '1663'),
}


def main(unused_argv):
  runtime.silence_logs()
  runtime.configure()
  if 'table' in FLAGS.what:
    _table()
  if 'flat' in FLAGS.what:
    _flat()


def _table():
  print(
    f'{"cores":>5} {"paper":>6} {"layers":>6} {"weights":>9} {"fits":>5} '
    f'{"peak GiB":>9} {"compile s":>9} {"largest":>8}'
  )
  for number in map(int, FLAGS.cores):
    row = _ROWS[number]
    weights, report = _compile(number, row.wanted, row.topology)
    largest = ''
    if FLAGS.largest:
      largest = row.wanted if report.fits else 0
      while _compile(number, largest + number, row.topology)[1].fits:
        largest += number
    print(
      f'{number:>5} {row.paper:>6} {row.wanted:>6} {weights / 1e6:>8,.0f}M '
      f'{"yes" if report.fits else "no":>5} {report.peak / _GIB:>9.2f} '
      f'{report.seconds:>9.1f} {largest:>8}',
      flush=True,
    )
    if not report.fits:
      print(report.text.splitlines()[0])


def _flat():
  """Compiles for 8 cores, a few times each."""
  topology = _ROWS[8].topology
  for name, small, large in (
    ('8 to 64 micro-batches', (8, 64, 8), (8, 64, 64)),
    ('2 to 16 layers a stage', (2, 32, 32), (16, 32, 32)),
  ):
    ratios = []
    for _ in range(FLAGS.runs):
      seconds = [
        _compile(8, 8 * layers, topology, batch, count)[1].seconds
        for layers, batch, count in (small, large)
      ]
      ratios.append(seconds[1] / seconds[0])
      print(f'{name}: {seconds[0]:.1f} s, {seconds[1]:.1f} s', flush=True)
    print(f'{name}: {statistics.median(ratios):.2f} times as long')


def _compile(num_cores, layers, topology, batch=32, micro_batches=32):
  """Returns (number of weights, the compiler's report)."""

  class Transformer(gpipe_transformer.GpipeTransformer):
    NUM_BLOCKS = layers
    NUM_STAGES = num_cores
    BATCH_SIZE = batch
    NUM_MICRO_BATCHES = micro_batches

  model = Transformer()
  task = model.Task().Set(random_seed=0, fprop_dtype=tf.bfloat16)
  task.input = model.Train().Set(random_seed=0)
  task.pipeline.Set(random_bits='hash', remat='full')
  spec = task.input.Instantiate().datasource.GetDataset().element_spec
  program = spmd.build(task, spec)
  cores = xla.devices(topology)
  weights = sum(e.spec.shape.num_elements() for e in program.step.weights)
  return weights, xla.compile_for(xla.lower(program), cores)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  app.run(main)
