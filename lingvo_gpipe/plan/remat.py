"""Which activations are kept for the backward pass, and which recomputed.

none          every stage keeps all of every micro-batch
full          every stage keeps its input alone and recomputes the rest
except_last   like full, but where backward follows forward at once nothing
              is recomputed: in the whole last stage, and for the last
              micro-batch, with which the drain begins
revolve:S     S layers' inputs at a time, fewest forwards for equal layers
budget        as little recomputation as fits into device_memory
"""

from lingvo_gpipe import checkpointing, errors

REMAT_MODES = ('none', 'full', 'except_last', 'budget')
_REVOLVE = 'revolve:'


def check(remat: str) -> None:
  """Raises a UserError if there is no such remat."""
  if remat in REMAT_MODES or _num_checkpoints(remat):
    return
  raise errors.UserError(
    f'remat={remat!r}: choose one of {", ".join(REMAT_MODES)}, or revolve:S '
    'with S checkpoints a stage, such as revolve:3.'
  )


def of_stage(
  remat: str, num_layers: int, is_last_stage: bool
) -> checkpointing.Remat:
  """Returns what a stage keeps of all micro-batches but the last.

  Args:
    remat: any but budget, for which costs are needed.
    num_layers: of the stage.
    is_last_stage: whether the stage is the last.
  """
  if remat == 'none' or (remat == 'except_last' and is_last_stage):
    return checkpointing.keep_all(num_layers)
  if num_checkpoints := _num_checkpoints(remat):
    return checkpointing.revolve(num_layers, num_checkpoints)
  return checkpointing.keep_inputs(num_layers)


def of_last_micro_batch(
  remat: str, ordinary: checkpointing.Remat, num_layers: int
) -> checkpointing.Remat:
  """Returns the same for the last micro-batch of a mini-batch."""
  if remat == 'except_last':
    return checkpointing.keep_all(num_layers)
  return ordinary


def _num_checkpoints(remat: str) -> int:
  """Returns S of `revolve:S`, 0 for anything else."""
  number = remat.removeprefix(_REVOLVE)
  return int(number) if number != remat and number.isdecimal() else 0
