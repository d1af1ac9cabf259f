"""What the fields of a PipeliningLayer mean to the spmd engine."""

from lingvo.core import learner

from lingvo_gpipe import errors, micro_batches, pipelining_params
from lingvo_gpipe.engine.spmd import mesh as mesh_lib

_SCHEDULES = ('gpipe', '1f1b', 'interleaved')
# Fields of a Learner that would need to know single variables.
_NOT_OF_ARRAYS = (
  'bprop_variable_filter',
  'bprop_variable_exclusion',
  'clip_gradient_single_norm_to_value',
  'l1_regularizer_weight',
  'l2_regularizer_weight',
  'grad_norm_tracker',
)


def check(p) -> None:
  """Raises a UserError for fields that only the mpmd engine knows."""
  if p.schedule_file or p.schedule not in _SCHEDULES:
    asked = p.schedule_file or p.schedule
    raise errors.UserError(
      f'The spmd engine fills and drains, with virtual stages or without; it '
      f'cannot run the schedule {asked}: set schedule to one of '
      f'{", ".join(_SCHEDULES)}, or use engine=mpmd.'
    )
  if p.batch_dim != 0:
    raise errors.UserError(
      f'{p.name}.batch_dim={p.batch_dim}: the spmd engine needs the batch in '
      'dimension 0. Use batch-major layers, or engine=mpmd.'
    )
  if p.random_bits != 'hash':
    raise errors.UserError(
      f'{p.name}.random_bits={p.random_bits}: inside of XLA it gives other '
      'bits. Set random_bits to hash, under both engines.'
    )
  V = virtual_stages(p)
  if num_stages(p) % V:
    raise errors.UserError(
      f'num_stages={num_stages(p)} is no multiple of virtual_stages={V}: set '
      f'num_stages to {num_stages(p) // V * V or V}.'
    )
  if p.loss_tpl is None:
    raise errors.UserError(f'{p.name}.loss_tpl is not set.')


def check_unequal(p, num_layers: int) -> None:
  """Raises a UserError for what stages that differ cannot have.

  Args:
    p: Params.
    num_layers: without the loss.
  """
  if virtual_stages(p) > 1:
    raise errors.UserError(
      f'num_stages={num_stages(p)} does not divide the equal layers, and '
      'stages that differ cannot be virtual: set num_stages to a divisor of '
      'their number, or schedule to 1f1b.'
    )
  if num_stages(p) > num_layers:
    raise errors.UserError(
      f'num_stages={num_stages(p)}, but there are only {num_layers} layers '
      f'before the loss: set num_stages to {num_layers} or less.'
    )


def check_tied(p, stage_layers) -> None:
  """Raises a UserError where a weight of the stages is tied.

  Args:
    p: Params.
    stage_layers: names of the layers of all stages.
  """
  for pair in p.tied_weights:
    tied = {path.partition('/')[0] for path in pair} & set(stage_layers)
    if tied:
      raise errors.UserError(
        f'{p.name}.tied_weights: {pair}: {tied.pop()} is in a stage, and the '
        'spmd engine ties weights of layers before and after the stages alone. '
        'Leave the pair out, or use engine=mpmd.'
      )


def virtual_stages(p) -> int:
  """Returns V, the stages of a core."""
  return (p.virtual_stages or 2) if p.schedule == 'interleaved' else 1


def num_stages(p) -> int:
  """Returns the stages of all cores of a replica."""
  return pipelining_params.num_stages(p)


def mesh(p) -> mesh_lib.Mesh:
  """Returns the cores that the Params ask for."""
  return mesh_lib.Mesh(num_stages(p) // virtual_stages(p), p.num_replicas)


def micro_batch_size(p, inputs) -> int:
  """Returns the examples of a micro-batch, of all replicas together.

  Raises:
    UserError: micro-batches would differ in size.
  """
  batch_size = micro_batches.batch_size(inputs, 0)
  shares = micro_batches.shares(p, batch_size)
  sizes = {size for share in shares for size in micro_batches.sizes(p, share)}
  if len(sizes) > 1:
    raise errors.UserError(
      f'The spmd engine needs micro-batches of one size; {batch_size} examples '
      f'make {sorted(sizes)}. Set the batch size to a multiple of '
      'num_micro_batches x num_replicas, or use engine=mpmd.'
    )
  return sizes.pop() * p.num_replicas


def num_micro_batches(p, size: int, inputs) -> int:
  """Returns M.

  Raises:
    UserError: too few for virtual stages.
  """
  count = micro_batches.batch_size(inputs, 0) // size
  cores = mesh(p).num_stages
  if virtual_stages(p) > 1 and count < cores:
    raise errors.UserError(
      f'num_micro_batches={count}: with virtual stages the spmd engine needs '
      f'one for each core at least; set num_micro_batches to {cores} or more.'
    )
  return count


def layers_per_segment(
  p, layers_per_stage: int, static_bytes: int, bytes_per_input: int
) -> int:
  """Returns after how many layers an input is kept, from `remat`.

  Args:
    p: Params.
    layers_per_stage: that may keep their inputs.
    static_bytes: what a core holds beside kept inputs.
    bytes_per_input: of an input kept for each micro-batch of each stage.

  Raises:
    UserError: the mode is unknown, or its budget too small.
  """
  counts = [
    n for n in range(layers_per_stage, 0, -1) if not layers_per_stage % n
  ]
  if p.remat == 'budget':
    memory = min(pipelining_params.machine(p).memory)
    for count in counts:
      if static_bytes + count * bytes_per_input <= memory:
        return layers_per_stage // count
    needed = static_bytes + bytes_per_input
    raise errors.UserError(
      f'device_memory={p.device_memory}: a core needs at least '
      f'{-(-needed // 1024):,}KiB. Use more stages, or smaller micro-batches.'
    )
  if p.remat in ('none', 'except_last'):
    return 1
  if p.remat == 'full':
    return layers_per_stage
  kind, _, number = p.remat.partition(':')
  if kind == 'revolve':
    # As many inputs as asked for, or the next number below that divides.
    return layers_per_stage // next(n for n in counts if n <= int(number))
  raise errors.UserError(
    f'remat={p.remat}: the spmd engine knows none (keeps the input of every '
    'layer), full (of every stage), revolve:S (S inputs a stage) and budget '
    '(as many as fit).'
  )


def learner_of(task):
  """Returns Params of the task's Learner, as Lingvo makes them.

  Raises:
    UserError: it does what cannot be done to arrays of many weights.
  """
  p = task.train.learner
  if p is None:
    p = learner.ExtractLearnerFromLegacyParams(task.train.Copy())
  if isinstance(p, (list, tuple)):
    raise errors.UserError(
      'task.train.learner is a list; the spmd engine runs one Learner. Use '
      'engine=mpmd.'
    )
  for field in _NOT_OF_ARRAYS:
    if p.Get(field):
      raise errors.UserError(
        f'task.train.{field}={p.Get(field)}: the spmd engine knows no such '
        'thing. Unset it, or use engine=mpmd.'
      )
  return p
