"""The trainer's flags, and how they override a model's Params."""

from absl import flags
from lingvo import model_registry  # Defines --model_params_override.
from lingvo.core import base_input_generator

from lingvo_gpipe import (
  errors,
  pipeline_task,
  pipelining_params,
  random_bits,
  schedule,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.engine import spmd
from lingvo_gpipe.plan import search

FLAGS = flags.FLAGS

flags.DEFINE_string(
  'model',
  None,
  'Which model to train: the name of a registered class, as in '
  'lm.byte_lm.Tiny, or my_models.lm.Big from a module of your own.',
)
flags.DEFINE_string(
  'logdir', None, 'Folder for checkpoints, metrics and plots of the run.'
)
flags.DEFINE_enum(
  'mode',
  'sync',
  ['sync', 'inspect_params', 'inspect_model'],
  'sync: run. inspect_params: print all Params. inspect_model: print the '
  'variables and the plan, and run nothing.',
)
flags.DEFINE_list(
  'job',
  ['trainer', 'evaler'],
  'trainer trains; evaler reports the loss on held-out data: after each '
  'checkpoint where both are named, else it waits for checkpoints in logdir. '
  'worker serves its devices to a trainer elsewhere.',
)
flags.DEFINE_integer(
  'max_steps', None, 'Train up to this step; default: task.train.max_steps.'
)
flags.DEFINE_string(
  'num_stages',
  None,
  'Stages of the pipeline, or auto; default: as the model says.',
)
flags.DEFINE_string(
  'num_micro_batches',
  None,
  'Micro-batches in a mini-batch, or auto; default: as the model says.',
)
flags.DEFINE_integer(
  'num_replicas',
  None,
  'Copies of the pipeline, each on its share of the mini-batch and on devices '
  'of its own; default: as the model says.',
  lower_bound=1,
)
flags.DEFINE_bool(
  'shard_optimizer',
  None,
  "Spread weights and the optimizer's slots over the devices of all replicas; "
  'default: as the model says.',
)
flags.DEFINE_enum(
  'engine',
  None,
  pipelining_params.ENGINES,
  'mpmd: a graph with a device for each stage. spmd: one XLA program for all '
  'cores, as on TPUs; here on virtual cores (needs lingvo_gpipe[tpu]), and '
  'with --random_bits=hash. Default: as the model says.',
)
flags.DEFINE_string(
  'tpu',
  None,
  'Run on this TPU, with --engine=spmd: its name in Google Cloud, its address '
  'as grpc://host:8470, or local on the machine that has it.',
)
flags.DEFINE_integer(
  'steps_per_loop',
  10,
  'With --tpu: steps between two looks at the metrics; checkpoints are made '
  'when they are due all the same.',
  lower_bound=1,
)
flags.DEFINE_enum(
  'random_bits',
  None,
  random_bits.NAMES,
  'Where the bits of dropout come from; default: as the model says, hash with '
  '--engine=spmd.',
)
flags.DEFINE_enum(
  'schedule',
  None,
  [*schedule.NAMES, search.AUTO],
  'Who does what when, or auto; default: as the model says. `python -m '
  'lingvo_gpipe.schedule` shows them.',
)
flags.DEFINE_integer(
  'virtual_stages',
  None,
  'Stages a device, of all num_stages, for --schedule=interleaved; default: 2.',
)
flags.DEFINE_string(
  'schedule_file',
  None,
  'A schedule of your own: a text file with one line a device, `0F0 0F1 ...`.',
)
flags.DEFINE_list(
  'trace_steps',
  [],
  'Steps at which to record when each action runs: --trace_steps=100,200 '
  'writes timeline-100.json (for Perfetto), timeline-100.png, and the bubble '
  'into the metrics.',
)
flags.DEFINE_string(
  'remat',
  None,
  f'Which activations to recompute: {", ".join(plan_lib.REMAT_MODES)}, '
  'revolve:S, or auto; default: as the model says.',
)
flags.DEFINE_string(
  'device_memory',
  None,
  'Memory of a device, such as 16GiB, or of each (8GiB,16GiB): plans keep '
  'within it. Default: as the model says, or no limit.',
)
flags.DEFINE_string(
  'device_speeds',
  None,
  'Speed of each device beside the others, such as 1,1,0.5; default: equal.',
)
flags.DEFINE_integer(
  'num_devices',
  None,
  'Devices that --num_stages=auto may use, those of all replicas; default: the '
  'GPUs, or the cores.',
  lower_bound=1,
)
flags.DEFINE_string(
  'profile',
  None,
  'File of measured times of the layers, to plan from in place of FLOPs.',
)
flags.DEFINE_integer(
  'checkpoint_every', 100, 'Steps between checkpoints.', lower_bound=1
)
flags.DEFINE_integer(
  'keep_checkpoints',
  5,
  'How many checkpoints to keep; the one before the newest is for when the '
  'newest is damaged.',
  lower_bound=2,
)
flags.DEFINE_integer(
  'seed', None, "Of weights, dropout and shuffling; default: the model's or 0."
)
flags.DEFINE_bool('list_models', False, 'Print the names of all models.')
flags.declare_key_flag('model_params_override')


# Flags of the name of a field of the PipeliningLayer, which they override.
_PIPELINE_FIELDS = (
  'num_stages',
  'num_micro_batches',
  'num_replicas',
  'shard_optimizer',
  'remat',
  'schedule',
  'virtual_stages',
  'schedule_file',
  'device_memory',
  'device_speeds',
  'profile',
  'engine',
  'random_bits',
)


def trace_steps() -> frozenset[int]:
  """Returns the steps to record.

  Raises:
    UserError: not numbers of steps.
  """
  try:
    steps = frozenset(map(int, FLAGS.trace_steps))
  except ValueError:
    steps = {0}
  if any(step < 1 for step in steps):
    raise errors.UserError(
      f'--trace_steps={",".join(FLAGS.trace_steps)}: give steps from 1 on, '
      'such as 100,200.'
    )
  return steps


def spmd_program(task) -> spmd.Program | None:
  """Returns the program of a task for the spmd engine, or None for mpmd.

  Raises:
    UserError: the engine cannot run it, or not as the flags say.
  """
  if task.pipeline.engine != 'spmd':
    return None
  if FLAGS.trace_steps:
    raise errors.UserError(
      '--trace_steps: one XLA program for all cores cannot be timed action by '
      'action. Leave it out, or use --engine=mpmd.'
    )
  spec = task.input.Instantiate().datasource.GetDataset().element_spec
  return spmd.build(task, spec)


def _number_or_auto(flag: str, text: str) -> int | str:
  if text == search.AUTO:
    return text
  try:
    return int(text)
  except ValueError as error:
    raise errors.UserError(
      f'--{flag}={text}: give a number, or auto.'
    ) from error


def model_params(model: str, dataset: str):
  """Returns the Params of a registered model, flags applied.

  Args:
    model: key of the model in Lingvo's registry.
    dataset: the method that gives the input, `Train` or `Dev`.

  Returns:
    (task Params, input Params).

  Raises:
    UserError: an override does not fit, or the model is not a pipeline.
  """
  try:
    p = model_registry._ModelRegistryHelper.GetParams(model, dataset)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise errors.UserError(f'--model_params_override: {error}') from error
  task = p.task.Copy()
  if not issubclass(task.cls, pipeline_task.PipelineTask):
    raise errors.UserError(
      f'--model={FLAGS.model} is a {task.cls.__name__}; the trainer runs '
      'lingvo_gpipe.pipeline_task.PipelineTask and its subclasses.'
    )
  if task.pipeline is None:
    raise errors.UserError(f'--model={FLAGS.model}: task.pipeline is not set.')
  if FLAGS.seed is not None:
    task.random_seed = FLAGS.seed
  task.random_seed = task.random_seed or 0
  if FLAGS.schedule and FLAGS.schedule_file:
    raise errors.UserError(
      'Give one of --schedule and --schedule_file, not both.'
    )
  if FLAGS.schedule is not None:  # It takes the place of a model's file.
    task.pipeline.Set(schedule_file=None, virtual_stages=None)
  for field in _PIPELINE_FIELDS:
    value = FLAGS[field].value
    if value is not None:
      if field in ('num_stages', 'num_micro_batches'):
        value = _number_or_auto(field, value)
      task.pipeline.Set(**{field: value})
  if FLAGS.tpu:
    if FLAGS.engine == 'mpmd':
      raise errors.UserError(
        '--tpu runs one program for all cores: leave out --engine=mpmd.'
      )
    task.pipeline.engine = 'spmd'
  if (FLAGS.engine == 'spmd' or FLAGS.tpu) and FLAGS.random_bits is None:
    task.pipeline.random_bits = 'hash'
  if FLAGS.max_steps is not None:
    task.train.max_steps = FLAGS.max_steps
  if p.input.cls is base_input_generator.BaseSequenceInputGenerator:
    raise errors.UserError(
      f'--model={FLAGS.model} has no input for {dataset}: define '
      f'{dataset}() in its class'
      + (', or train with --job=trainer.' if dataset != 'Train' else '.')
    )
  input_params = p.input.Copy()
  if input_params.random_seed is None:
    input_params.random_seed = task.random_seed
  return task, input_params
