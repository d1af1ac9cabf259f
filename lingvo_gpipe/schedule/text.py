"""Schedules as text: one line a device, `#` begins a comment.

# two stages, three micro-batches
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""

import re

from lingvo_gpipe import errors
from lingvo_gpipe.schedule import verification
from lingvo_gpipe.schedule.action import KINDS, Action, Schedule

_ACTION = re.compile(r'(\d+)([A-Za-z])(\d+)(?:\.(\d+))?(?:@(\d+))?')


def to_text(schedule: Schedule) -> str:
  return ''.join(' '.join(map(str, actions)) + '\n' for actions in schedule)


def read_file(path: str, num_stages: int, num_micro_batches: int) -> Schedule:
  """Reads a schedule and verifies it.

  Raises:
    UserError: it cannot be read, or does not fit; the message has the line, the
      token and the reason.
  """
  try:
    with open(path, encoding='utf-8') as file:
      lines = file.read().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise errors.UserError(f'--schedule_file={path}: {error}.') from error
  devices, line_numbers = [], []
  for number, line in enumerate(lines, 1):
    tokens = re.split(r'[,\s]+', line.partition('#')[0].strip(', \t'))
    if tokens != ['']:
      devices.append(tuple(_parse(t, f'{path}, line {number}') for t in tokens))
      line_numbers.append(number)
  schedule = tuple(devices)
  if not schedule:
    raise errors.UserError(f'{path} has no actions: write one line a device.')
  try:
    verification.verify(schedule, num_stages, num_micro_batches)
  except verification.ScheduleError as error:
    raise errors.UserError(
      _locate(error, path, schedule, line_numbers)
    ) from error
  return schedule


def _parse(token, place):
  match = _ACTION.fullmatch(token)
  if not match or match[2] not in KINDS:
    raise errors.UserError(
      f'{place}, "{token}": no such action; write stage, kind (one of '
      f'{" ".join(KINDS)}) and micro-batch, as in 2F0.'
    )
  stage, kind, micro_batch, slice_, version = match.groups(default='0')
  return Action(int(stage), kind, int(micro_batch), int(slice_), int(version))


def _locate(error, path, schedule, line_numbers):
  """Returns the message of a ScheduleError with the place in the file."""
  if error.device is None:
    return f'{path}, last line {line_numbers[-1]}: {error.reason}.'
  actions = schedule[error.device]
  place = f'{path}, line {line_numbers[error.device]}'
  token = (
    f'"{actions[error.position]}"'
    if error.position < len(actions)
    else f'after "{actions[-1]}"'
  )
  grid = verification.mark(schedule, error.device, error.position)
  return f'{place}, {token}: {error.reason}.\n{grid}'
