"""The schedules that can be asked for by name."""

from lingvo_gpipe import errors
from lingvo_gpipe.schedule import text, verification
from lingvo_gpipe.schedule.action import Schedule
from lingvo_gpipe.schedule.fill_drain import gpipe
from lingvo_gpipe.schedule.interleaved import interleaved
from lingvo_gpipe.schedule.one_f_one_b import one_f_one_b
from lingvo_gpipe.schedule.zbv import zbv
from lingvo_gpipe.schedule.zero_bubble import zb1p, zb2p

_ON_A_DEVICE_EACH = {
  'gpipe': gpipe,
  '1f1b': one_f_one_b,
  'zb1p': zb1p,
  'zb2p': zb2p,
}
NAMES = (*_ON_A_DEVICE_EACH, 'interleaved', 'zbv')


def make(
  name: str,
  num_stages: int,
  num_micro_batches: int,
  virtual_stages: int | None = None,
) -> Schedule:
  """Returns a schedule by its name.

  Args:
    name: one of NAMES.
    num_stages: K, on all devices together.
    num_micro_batches: M.
    virtual_stages: V, stages a device; None for the schedule's own (1, or 2
      for interleaved and zbv).

  Raises:
    UserError: the schedule does not exist for these numbers.
  """
  per_device = _stages_per_device(
    name, num_stages, num_micro_batches, virtual_stages
  )
  if name == 'interleaved':
    return interleaved(num_stages, num_micro_batches, per_device)
  if name == 'zbv':
    return zbv(num_stages, num_micro_batches)
  return _ON_A_DEVICE_EACH[name](num_stages, num_micro_batches)


def _stages_per_device(name, num_stages, num_micro_batches, virtual_stages):
  """Returns V; raises a UserError where `make` would."""
  if name not in NAMES:
    raise errors.UserError(
      f'schedule={name!r}: choose one of {", ".join(NAMES)}, or give your own '
      'as schedule_file.'
    )
  for field, value in (
    ('num_stages', num_stages),
    ('num_micro_batches', num_micro_batches),
    ('virtual_stages', 1 if virtual_stages is None else virtual_stages),
  ):
    if value < 1:
      raise errors.UserError(f'{field}={value}: at least 1.')
  own = 1 if name in _ON_A_DEVICE_EACH else 2
  if virtual_stages not in (None, own) and name != 'interleaved':
    raise errors.UserError(
      f'virtual_stages={virtual_stages}, but schedule={name} has {own} a '
      'device: leave virtual_stages out, or choose schedule=interleaved.'
    )
  per_device = virtual_stages or own
  below = num_stages - num_stages % per_device
  if below != num_stages:
    nearest = f'{below} or ' if below else ''
    raise errors.UserError(
      f'num_stages={num_stages} does not fill devices of {per_device} stages, '
      f'as schedule={name} has them: set num_stages to {nearest}'
      f'{below + per_device}.'
    )
  return per_device


def make_or_read(
  name: str,
  num_stages: int,
  num_micro_batches: int,
  virtual_stages: int | None = None,
  file: str | None = None,
) -> Schedule:
  """Returns the schedule in `file` or else that of the name, verified."""
  if file:
    return text.read_file(file, num_stages, num_micro_batches)
  schedule = make(name, num_stages, num_micro_batches, virtual_stages)
  verification.verify(schedule, num_stages, num_micro_batches)
  return schedule
