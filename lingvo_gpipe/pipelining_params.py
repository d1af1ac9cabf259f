"""The fields of a PipeliningLayer, what they mean and how they may be set."""

import itertools
import math

from lingvo.core import base_layer

from lingvo_gpipe import errors, layer_list, random_bits
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import search

# Leaves a field to the planner, in the trainer and in lingvo_gpipe.plan.
AUTO = search.AUTO
ENGINES = ('mpmd', 'spmd')
_MAY_BE_AUTO = ('num_stages', 'num_micro_batches', 'schedule', 'remat')


def define(p) -> None:
  """Adds the fields of a PipeliningLayer to `p`."""
  p.Define(
    'layer_tpl',
    [],
    'The network as a list of layer Params, each taking what the one before '
    'returns. Cut into num_stages stages of equal cost.',
  )
  p.Define(
    'cell_tpl',
    [],
    'In place of layer_tpl: the stages, ready cut, a layer or a '
    'gpipe.FeatureExtractionLayer for each.',
  )
  p.Define(
    'before_tpl', [], 'Layers that run before cell_tpl, on the first stage.'
  )
  p.Define(
    'loss_tpl',
    None,
    'The layer that ends the last stage: FProp(theta, *outputs, *targets) '
    'returns a NestedMap of metrics, each (average, weight).',
  )
  p.Define('loss_name', 'loss', 'Which of the metrics of loss_tpl to minimise.')
  p.Define(
    'tied_weights',
    [],
    'Weights that are one variable, as pairs (later, earlier) of names that '
    "--mode=inspect_model prints: [('softmax/w', 'embedding/table')]; a pair "
    'of layers ties all of their weights. They may be on different stages.',
  )
  p.Define(
    'num_stages',
    1,
    'How many stages to cut layer_tpl into. Each has its device, or several '
    'share one if the schedule says so.',
  )
  p.Define(
    'schedule',
    '1f1b',
    'Who does what when: "gpipe" (fills, then drains), "1f1b" (as fast, less '
    'memory), "interleaved" (virtual_stages a device: shorter bubble), "zb1p", '
    '"zb2p" (backward in two halves: shortest bubble, more memory), or "zbv" '
    '(as short, two stages a device). `python -m lingvo_gpipe.schedule` shows '
    'them.',
  )
  p.Define(
    'virtual_stages',
    None,
    'Stages a device, of all num_stages; for schedule="interleaved", 2 unless '
    'set.',
  )
  p.Define(
    'schedule_file',
    None,
    'A schedule of your own in place of `schedule`: a text file with one line '
    'a device, such as "0F0 0F1 0B0 0B1".',
  )
  p.Define(
    'num_micro_batches',
    1,
    'How many micro-batches to split the mini-batch (of each replica) into, '
    'sizes differing by at most one example. More of them shrink the bubble; 4 '
    'a stage is good.',
  )
  p.Define(
    'num_replicas',
    1,
    'How many copies of the pipeline to run, each on devices of its own and '
    'on its share of the mini-batch (data parallelism). They take num_replicas '
    'times the devices; losses are those of one, but for rounding.',
  )
  p.Define(
    'shard_optimizer',
    False,
    "Whether to spread a stage's weights and the optimizer's slots over its "
    'devices in all replicas, layer by layer, in place of keeping all on those '
    'of the first: less memory there, the same losses to the bit.',
  )
  p.Define(
    'micro_batch_size',
    None,
    'Examples in a micro-batch; if set, num_micro_batches follows from it.',
  )
  p.Define('batch_dim', 0, 'The dimension of all tensors that is the batch.')
  p.Define(
    'remat',
    'except_last',
    'Which activations to recompute in the backward pass: "none" (fastest, '
    'most memory), "full" (a stage keeps its input alone), "except_last" '
    '(as full, but not where backward follows forward at once), "budget" (as '
    'little as fits into device_memory), or "revolve:S" (S checkpoints a '
    'stage).',
  )
  p.Define(
    'engine',
    'mpmd',
    'What the trainer runs it by: "mpmd", a graph with a device for each stage '
    '(CPUs, GPUs, clusters; any layers), or "spmd", one XLA program for all '
    'cores (TPUs; best for stages of equal layers). Same losses.',
  )
  p.Define(
    'random_bits',
    'philox',
    'Where the random bits of dropout come from: "philox", TensorFlow\'s '
    'generator for CPUs and GPUs, or "hash", integer operations that give the '
    'same bits on TPUs too (engine spmd). Masks differ between the two.',
  )
  p.Define(
    'device_memory',
    None,
    'Memory of a device, such as "16GiB", or of each in a replica '
    '("8GiB,16GiB"): cuts and remat="budget" keep within it.',
  )
  p.Define(
    'device_speeds',
    None,
    'How fast each device of a replica is beside the others, such as '
    '"1,1,0.5"; equal if not set. Slow devices get smaller stages.',
  )
  p.Define(
    'profile',
    None,
    'File of measured times of the layers, to plan from in place of their '
    'FLOPs; `python -m lingvo_gpipe.plan --profile=FILE` makes it.',
  )
  p.Define(
    'optimizer',
    None,
    'Params of the optimizer, whose slots count towards device_memory; a '
    'PipelineTask sets it.',
  )
  p.Define(
    'devices',
    None,
    'TensorFlow names of the devices of the schedule, those of one replica '
    'after the other; by default the GPUs, or else virtual CPU devices.',
  )
  p.Define(
    'input_specs',
    None,
    'tf.TensorSpec of each FProp argument, for a whole mini-batch; needed to '
    'weigh the layers. Without it layer_tpl is cut by number of layers.',
  )
  p.Define(
    'target_specs',
    (),
    'tf.TensorSpec of each argument of loss_tpl after the outputs.',
  )
  p.Define(
    'nested_map_fprop',
    False,
    'As in Lingvo, where stages that exchange a NestedMap need it; '
    'here tensors, tuples and NestedMaps pass either way.',
  )


def check(p) -> None:
  """Raises a UserError if the Params of a PipeliningLayer contradict."""
  if bool(p.layer_tpl) == bool(p.cell_tpl):
    raise errors.UserError(
      f'{p.name}: set one of layer_tpl (a list of layers to be cut) and '
      'cell_tpl (ready-cut stages).'
    )
  if p.remat != AUTO:
    plan_lib.check_remat(p.remat)
  if p.remat == 'budget' and not p.device_memory:
    raise errors.UserError(
      'remat=budget needs to know the budget: set device_memory, such as 16GiB.'
    )
  if p.random_bits not in random_bits.NAMES:
    raise errors.UserError(
      f'{p.name}.random_bits={p.random_bits!r}: choose one of '
      f'{", ".join(random_bits.NAMES)}.'
    )
  if p.engine not in ENGINES:
    raise errors.UserError(
      f'{p.name}.engine={p.engine!r}: choose one of {", ".join(ENGINES)}.'
    )
  for field in ('num_stages', 'num_micro_batches', 'num_replicas'):
    if p.Get(field) != AUTO and p.Get(field) < 1:
      raise errors.UserError(f'{p.name}.{field}={p.Get(field)}: at least 1.')
  if p.shard_optimizer and p.num_replicas == 1:
    raise errors.UserError(
      f'{p.name}.shard_optimizer=True spreads weights over replicas, but '
      'num_replicas=1: set num_replicas to 2 or more, or shard_optimizer to '
      'False.'
    )
  if p.cell_tpl and p.num_stages not in (1, AUTO, len(p.cell_tpl)):
    raise errors.UserError(
      f'{p.name}.num_stages={p.num_stages}, but cell_tpl is cut into '
      f'{len(p.cell_tpl)} stages: put the layers into layer_tpl to cut anew.'
    )
  if p.schedule_file and p.micro_batch_size:
    raise errors.UserError(
      f'{p.name}: schedule_file is for a fixed number of micro-batches; set '
      'num_micro_batches in place of micro_batch_size.'
    )
  num_layers = len(list_layers(p)[0])
  if p.num_stages != AUTO and p.num_stages > num_layers:
    raise errors.UserError(
      f'num_stages={p.num_stages}, but there are only {num_layers} layers: set '
      f'num_stages to {num_layers} or less.'
    )


def open_fields(p) -> list[str]:
  """Returns the fields that are left to the planner."""
  return [field for field in _MAY_BE_AUTO if p.Get(field) == AUTO]


def num_stages(p) -> int:
  """Returns the number of stages, however they are given."""
  return len(p.cell_tpl) or p.num_stages


def make_schedule(p, num_micro_batches: int) -> schedule_lib.Schedule:
  """Returns the verified schedule that the Params ask for.

  Raises:
    UserError: there is none for these numbers, or the file is wrong.
  """
  return schedule_lib.make_or_read(
    p.schedule,
    num_stages(p),
    num_micro_batches,
    p.virtual_stages,
    p.schedule_file,
  )


def machine(p, **assumed) -> plan_lib.Machine:
  """Returns what the Params say of the devices.

  Args:
    p: Params.
    **assumed: further fields of the Machine.

  Raises:
    UserError: they say nonsense.
  """
  try:
    speeds = tuple(map(float, p.device_speeds.split(',')))
  except AttributeError:
    speeds = ()
  except ValueError:
    speeds = (0.0,)
  if any(not 0 < speed < math.inf for speed in speeds):
    raise errors.UserError(
      f'device_speeds={p.device_speeds!r}: give a positive number for each '
      'device, such as "1,1,0.5".'
    )
  made = plan_lib.Machine(
    memory=plan_lib.parse_memory(p.device_memory), speeds=speeds, **assumed
  )
  return plan_lib.read_profile(p.profile, made) if p.profile else made


def num_devices(p) -> int:
  """Returns how many devices the schedule takes, in each replica."""
  return len(make_schedule(p, p.num_micro_batches))


def list_layers(p):
  """Returns all layers, copied and named, and the stages if they are cut.

  Layers have what they inherit from the pipeline, such as fprop_dtype.
  """
  cells = [layer_list.flatten([cell]) for cell in p.cell_tpl]
  cells = cells or [layer_list.flatten(p.layer_tpl)]
  cells[0] = layer_list.flatten(p.before_tpl) + cells[0]
  if p.loss_tpl:
    cells[-1].append(p.loss_tpl.Copy())
  layers = [layer for cell in cells for layer in cell]
  for layer in layers:
    base_layer.BaseLayer.CopyBaseParams(p, layer)
  layer_list.give_unique_names(layers)
  if not p.cell_tpl:
    return layers, None
  stops = list(itertools.accumulate(len(cell) for cell in cells))
  return layers, [range(a, b) for a, b in itertools.pairwise([0, *stops])]
