"""Compiles a model's training step for a TPU slice, without a TPU.

    python tools/compile_for_tpu.py --topology=v5e:2x4 --num_layers=144 \\
        --model=lm.gpipe_transformer.Transformer13 --num_micro_batches=32

What is compiled is the step that the trainer runs with engine=spmd: forward,
backward, clipping and the optimizer, in bfloat16 on float32 weights. Tells
whether it fits, what a core holds, and how the cores talk to each other.
--search=num_layers finds the most equal layers that the compiler accepts.

Takes the trainer's flags; --num_stages is by default the cores of the slice.
Needs the extra "tpu": pip install -e .[tpu]
"""

import math

from absl import app, flags

from lingvo_gpipe import errors, runtime

with runtime.quiet_tensorflow():
  import tensorflow as tf

  from lingvo_gpipe import layer_list, xla
  from lingvo_gpipe import plan as plan_lib
  from lingvo_gpipe.engine import spmd
  from lingvo_gpipe.trainer import models, options

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(options)

flags.DEFINE_string(
  'topology', 'v5e:2x2', 'The slice, such as v5e:2x4, v6e:2x2 or v4:2x2x1.'
)
flags.DEFINE_integer(
  'num_layers',
  None,
  'How often the equal layers of the model are to repeat; default: as the '
  'model says.',
  lower_bound=1,
)
flags.DEFINE_bool('bfloat16', True, 'Compute in bfloat16.')
flags.DEFINE_enum(
  'search', None, ['num_layers'], 'Find the most that the compiler accepts.'
)
flags.DEFINE_string(
  'output', None, 'Write the text of the optimised program to this file.'
)

_GIB = 2**30


def main(argv: list[str]) -> int:
  """Prints what the compiler says; returns 2 after a mistake of the user."""
  runtime.silence_logs()
  return errors.run_command(argv, _run)


def _run() -> None:
  if not FLAGS.model:
    raise errors.UserError(
      '--model is missing; --list_models of the trainer prints all names.'
    )
  runtime.configure()
  cores = xla.devices(FLAGS.topology)
  capacity = xla.memory(cores)
  print(
    f'{FLAGS.topology}: {len(cores)} cores of {capacity / _GIB:.2f} GiB',
    flush=True,
  )
  if not FLAGS.search:
    return _tell(*compile_model(FLAGS.num_layers, cores), capacity)
  stages = _task(None, len(cores)).pipeline.num_stages

  def accepts(per_stage):
    program, report = compile_model(per_stage * stages, cores)
    verdict = 'fits' if report.fits else 'does not fit'
    layers = program.shape.layers_per_stage * stages
    print(f'{layers} layers: {verdict} ({report.seconds:.0f} s)', flush=True)
    return report.fits

  best = most(accepts)
  if not best:
    raise errors.UserError(
      f'--topology={FLAGS.topology}: not one layer a stage fits. Choose more '
      'cores, or a smaller model or batch.'
    )
  _tell(*compile_model(best * stages, cores), capacity)
  return None


def most(accepts) -> int:
  """Returns the largest number that is accepted, where smaller ones are."""
  low, high = 0, 1
  while accepts(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    if accepts(middle):
      low = middle
    else:
      high = middle
  return low


def compile_model(num_layers: int | None, cores: list):
  """Returns the program of the model, with so many layers, and the Report."""
  task = _task(num_layers, len(cores))
  spec = task.input.Instantiate().datasource.GetDataset().element_spec
  program = spmd.build(task, spec)
  return program, xla.compile_for(xla.lower(program), cores)


def _task(num_layers, num_cores):
  task, task.input = options.model_params(models.find(FLAGS.model), 'Train')
  pipeline = task.pipeline
  if FLAGS.num_stages is None:
    pipeline.num_stages = max(1, num_cores // pipeline.num_replicas)
  if FLAGS.remat is None:
    pipeline.remat = 'full'
  pipeline.random_bits = 'hash'
  if FLAGS.bfloat16:
    task.fprop_dtype = tf.bfloat16
  if num_layers is not None:
    pipeline.layer_tpl = _with_equal_layers(pipeline.layer_tpl, num_layers)
  return task


def _with_equal_layers(layers, count):
  """Returns layers with the longest run of equal ones made so long."""
  layers = layer_list.flatten(layers)
  keys = [plan_lib.structure_key(layer) for layer in layers]
  start = max(range(len(keys)), key=lambda l: _run_length(keys, l))
  stop = start + _run_length(keys, start)
  return [*layers[:start], *[layers[start]] * count, *layers[stop:]]


def _run_length(keys, start):
  length = 1
  while start + length < len(keys) and keys[start + length] == keys[start]:
    length += 1
  return length


def _tell(program, report, capacity):
  """Prints what was compiled, and how it came out."""
  weights = sum(math.prod(e.spec.shape) for e in program.step.weights)
  print(f'{weights / 1e6:,.1f}M weights; {program.describe()}')
  if not report.fits:
    first_line, *_ = report.text.splitlines()
    print(f'does not fit ({report.seconds:.1f} s): {first_line}')
    return
  spare = capacity - report.peak
  print(
    f'fits, {spare / _GIB:.2f} GiB to spare; compiled in '
    f'{report.seconds:.1f} s\n'
    f'a core: peak {report.peak / _GIB:.2f} GiB, arguments '
    f'{report.arguments / _GIB:.2f}, temporaries '
    f'{report.temporaries / _GIB:.2f}; {report.flops:.3g} FLOPs in one turn '
    'of every loop'
  )
  print('collectives in the program: ' + _counts(report.collectives))
  print('  in loops over ticks: ' + _counts(xla.in_ticks(report.text)))
  if FLAGS.output:
    with open(FLAGS.output, 'w', encoding='utf-8') as file:
      file.write(report.text)


def _counts(collectives):
  return ', '.join(f'{n} {kind}' for kind, n in collectives.items()) or 'none'


if __name__ == '__main__':
  app.run(main)
