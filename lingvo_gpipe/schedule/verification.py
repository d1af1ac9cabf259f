"""Checks a schedule before anything is built; marks the first wrong cell.

device 0   0F0   0F1   0B0   0B1
device 1   1F0 >>1B1<< 1B0   1F1
1B1 waits for 1F1, which comes later on the same device
"""

import collections

from lingvo_gpipe import errors
from lingvo_gpipe.schedule import memory
from lingvo_gpipe.schedule.action import (
  BACKWARD,
  KINDS,
  UPDATE,
  Action,
  Schedule,
  effects,
  needs,
)

# How many cells left and right of the wrong one an error shows.
_CELLS_SHOWN = 5


class ScheduleError(errors.UserError):
  """A schedule that cannot be run.

  Attributes:
    reason: what is wrong, in a line.
    device: on which line; None if on none.
    position: at which action of the line; its length for one that is missing.
  """

  def __init__(
    self,
    reason: str,
    schedule: Schedule,
    device: int | None = None,
    position: int = 0,
  ):
    grid = '' if device is None else '\n' + mark(schedule, device, position)
    super().__init__(f'The schedule cannot run: {reason}.{grid}')
    self.reason = reason
    self.device = device
    self.position = position


def verify(
  schedule: Schedule,
  num_stages: int,
  num_micro_batches: int,
  num_slices: int = 1,
  max_in_flight: int | None = None,
) -> None:
  """Checks that `schedule` trains K stages on M micro-batches.

  Every action is there once, a stage keeps to one device, backward is whole
  (B) or split (I and W), forward and backward see the same weights, and no
  device waits for ever.

  Args:
    schedule: to check.
    num_stages: K.
    num_micro_batches: M.
    num_slices: S, of the sequence.
    max_in_flight: micro-batches whose activations a device may hold at once,
      counted for each of its stages; None for any number.

  Raises:
    ScheduleError: at the first wrong cell.
  """
  _check_names(schedule, num_stages, num_micro_batches, num_slices)
  _check_placement(schedule)
  _check_once(schedule, num_stages, num_micro_batches, num_slices)
  _check_versions(schedule)
  global_order(schedule, num_stages, num_slices)
  if max_in_flight is not None:
    _check_in_flight(schedule, max_in_flight)


def global_order(
  schedule: Schedule, num_stages: int, num_slices: int = 1
) -> list[Action]:
  """Returns all actions, each after those that it needs.

  The order within a device is that of the schedule.

  Raises:
    ScheduleError: the devices wait for each other for ever.
  """
  order, done = [], set()
  positions = [0] * len(schedule)

  def missing(device):
    """Returns what the next action of the device still waits for."""
    action = schedule[device][positions[device]]
    wanted = needs(action, num_stages, num_slices)
    return next((effect for effect in wanted if effect not in done), None)

  def unfinished():
    return [d for d, a in enumerate(schedule) if positions[d] < len(a)]

  while waiting := unfinished():
    runnable = [device for device in waiting if missing(device) is None]
    if not runnable:
      stuck = {device: missing(device) for device in waiting}
      raise _deadlock(schedule, positions, stuck)
    for device in runnable:
      action = schedule[device][positions[device]]
      order.append(action)
      done.update(effects(action))
      positions[device] += 1
  return order


def mark(schedule: Schedule, device: int, position: int) -> str:
  """Returns the lists as a grid around one cell, which is marked."""
  first = max(0, position - _CELLS_SHOWN)
  last = position + _CELLS_SHOWN
  rows = []
  for d, actions in enumerate(schedule):
    cells = [str(a) for a in actions[first : last + 1]]
    if d == device:
      cells += [''] * (position - first + 1 - len(cells))
      cells[position - first] = f'>>{cells[position - first]}<<'
    cells = ['...'] * (first > 0) + cells + ['...'] * (len(actions) > last + 1)
    rows.append([f'device {d}', *cells])
  width = max(len(cell) for row in rows for cell in row[1:])
  name_width = max(len(row[0]) for row in rows)
  return '\n'.join(
    f'{row[0]:<{name_width}}  '
    + ' '.join(f'{cell:^{width}}' for cell in row[1:]).rstrip()
    for row in rows
  )


def _cells(schedule):
  for device, actions in enumerate(schedule):
    for position, action in enumerate(actions):
      yield device, position, action


def _check_names(schedule, num_stages, num_micro_batches, num_slices):
  for device, position, action in _cells(schedule):

    def wrong(reason, device=device, position=position):
      raise ScheduleError(reason, schedule, device, position)

    if action.kind not in KINDS:
      wrong(f'{action} is no action: kinds are {" ".join(KINDS)}')
    for what, number, limit in (
      ('stage', action.stage, num_stages),
      ('micro-batch', action.micro_batch, num_micro_batches),
      ('slice', action.slice, num_slices),
    ):
      if not 0 <= number < limit:
        wrong(f'{action} is of {what} {number}, they go from 0 to {limit - 1}')


def _check_placement(schedule):
  """A stage has its weights on one device: the one with most of its actions."""
  counts = collections.defaultdict(collections.Counter)
  for device, _, action in _cells(schedule):
    counts[action.stage][device] += 1
  homes = {k: c.most_common(1)[0][0] for k, c in counts.items()}
  for device, position, action in _cells(schedule):
    home = homes[action.stage]
    if device != home:
      raise ScheduleError(
        f'{action} is on device {device}, but stage {action.stage} on device '
        f'{home}',
        schedule,
        device,
        position,
      )


def _check_once(schedule, num_stages, num_micro_batches, num_slices):
  seen = {}
  homes = {}
  for device, position, action in _cells(schedule):
    homes[action.stage] = device
    for effect in effects(action):
      if effect in seen:
        raise ScheduleError(
          f'{action} comes after {seen[effect]}, which does the same already',
          schedule,
          device,
          position,
        )
      seen[effect] = action
  for k in range(num_stages):
    if k not in homes:
      raise ScheduleError(f'no device has stage {k}', schedule)
    for i in range(num_micro_batches):
      for s in range(num_slices):
        missing = [kind for kind in 'FIW' if Action(k, kind, i, s) not in seen]
        if missing:
          kind = BACKWARD if missing[-2:] == ['I', 'W'] else missing[-1]
          kind = 'F' if 'F' in missing else kind
          raise ScheduleError(
            f'device {homes[k]} ends without {Action(k, kind, i, s)}',
            schedule,
            homes[k],
            len(schedule[homes[k]]),
          )


def _check_versions(schedule):
  """An update makes the next version; backward takes what forward took."""
  newest = collections.Counter()
  taken = {}
  for device, position, action in _cells(schedule):
    k, version = action.stage, action.version
    key = k, action.micro_batch, action.slice
    reason = None
    if action.kind == UPDATE:
      if version != newest[k] + 1:
        reason = f'{action} makes version {version}, next is {newest[k] + 1}'
      newest[k] = version
    elif version > newest[k] or version < 0:
      reason = f'{action} takes version {version}, newest is {newest[k]}'
    elif taken.setdefault(key, action).version != version:
      reason = f'{action} takes other weights than {taken[key]}'
    if reason:
      raise ScheduleError(reason, schedule, device, position)


def _check_in_flight(schedule, limit):
  for device, held in enumerate(memory.held(schedule)):
    for position, count in enumerate(held):
      if count > limit:
        raise ScheduleError(
          f'{schedule[device][position]} would bring device {device} to '
          f'{count:g} micro-batches in flight, allowed are {limit}',
          schedule,
          device,
          position,
        )


def _deadlock(schedule, positions, stuck):
  """Follows who waits for whom until it comes round."""
  home = {
    effect: device
    for device, _, action in _cells(schedule)
    for effect in effects(action)
  }
  device, path = min(stuck), []
  while device not in path:
    path.append(device)
    device = home[stuck[device]]
  circle = path[path.index(device) :]
  reasons = []
  for d in circle:
    action, wanted = schedule[d][positions[d]], stuck[d]
    there = home[wanted]
    behind = (
      'comes later on the same device'
      if there == d
      else f'device {there} does after {schedule[there][positions[there]]}'
    )
    reasons.append(f'{action} waits for {wanted}, which {behind}')
  return ScheduleError(
    'a circle of waits: ' + '; '.join(reasons),
    schedule,
    circle[0],
    positions[circle[0]],
  )
