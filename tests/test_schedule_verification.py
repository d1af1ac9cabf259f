"""What generators make is accepted, and nothing that was tampered with."""

import random

import pytest
import schedule_cases

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import action as action_lib
from lingvo_gpipe.schedule.action import Action

_CASES = list(schedule_cases.random_cases(3000))


def _rejected(devices, num_stages, num_micro_batches):
  """Verifies lists of actions; returns the error, which must have a cell."""
  built = tuple(tuple(actions) for actions in devices)
  with pytest.raises(schedule.ScheduleError) as caught:
    schedule.verify(built, num_stages, num_micro_batches)
  assert caught.value.device is not None
  assert '>>' in str(caught.value)
  return caught.value


def _pick(numbers, devices):
  device = numbers.randrange(len(devices))
  return device, numbers.randrange(len(devices[device]))


def test_generated_schedules_are_accepted():
  for name, K, M, V in _CASES:
    built = schedule.make(name, K, M, V)
    assert len(built) == K // V
    schedule.verify(built, K, M)


def test_a_dropped_action_is_found():
  numbers = random.Random(1)
  for name, K, M, V in _CASES:
    devices = list(map(list, schedule.make(name, K, M, V)))
    device, position = _pick(numbers, devices)
    if len(devices[device]) == 1:
      continue
    dropped = devices[device].pop(position)
    if all(dropped.stage != a.stage for a in devices[device]):
      continue
    error = _rejected(devices, K, M)
    assert str(dropped) in error.reason
    assert error.device == device


def test_a_doubled_action_is_found():
  numbers = random.Random(2)
  for name, K, M, V in _CASES:
    devices = list(map(list, schedule.make(name, K, M, V)))
    device, position = _pick(numbers, devices)
    doubled = devices[device][position]
    devices[device].insert(numbers.randint(0, len(devices[device])), doubled)
    error = _rejected(devices, K, M)
    assert devices[error.device][error.position] == doubled


def test_an_action_on_another_device_is_found():
  numbers = random.Random(3)
  for name, K, M, V in _CASES:
    devices = list(map(list, schedule.make(name, K, M, V)))
    if len(devices) == 1:
      continue
    device, position = _pick(numbers, devices)
    moved = devices[device].pop(position)
    other = numbers.choice([d for d in range(len(devices)) if d != device])
    devices[other].insert(numbers.randint(0, len(devices[other])), moved)
    error = _rejected(devices, K, M)
    assert devices[error.device][error.position].stage == moved.stage


def test_an_action_before_what_it_needs_is_found():
  numbers = random.Random(4)
  found = 0
  for name, K, M, V in _CASES:
    devices = list(map(list, schedule.make(name, K, M, V)))
    device, position = _pick(numbers, devices)
    actions = devices[device]
    needed = action_lib.needs(actions[position], K)
    before = [
      p
      for p in range(position)
      if set(action_lib.effects(actions[p])) & set(needed)
    ]
    if not before:
      continue
    swapped = numbers.choice(before)
    actions[swapped], actions[position] = actions[position], actions[swapped]
    assert 'a circle of waits' in _rejected(devices, K, M).reason
    found += 1
  assert found > 1000


def _actions(text):
  return tuple(
    Action(int(t[0]), t[1], int(t[2]), version=int(t[4:] or 0))
    for t in text.split()
  )


def test_a_circle_over_devices_is_told():
  built = _actions('0F0 0B0 0F1 0B1'), _actions('1F1 1F0 1B0 1B1')
  with pytest.raises(schedule.ScheduleError) as caught:
    schedule.verify(built, 2, 2)
  assert str(caught.value).splitlines() == [
    'The schedule cannot run: a circle of waits: 0B0 waits for 1I0, which '
    'device 1 does after 1F1; 1F1 waits for 0F1, which device 0 does after '
    '0B0.',
    'device 0    0F0   >>0B0<<   0F1     0B1',
    'device 1    1F1     1F0     1B0     1B1',
  ]


@pytest.mark.parametrize(
  'text, reason',
  [
    ('0F0 0B0 0F1', 'device 0 ends without 0B1'),
    ('0F0 0I0 0F1 0B1', 'device 0 ends without 0W0'),
    ('0F0 0B0 0B1', 'device 0 ends without 0F1'),
    ('0F0 0B0 0W0 0F1 0B1', '0W0 comes after 0B0, which does the same'),
    ('0F0 0B0 0F1 0B1 0F2', '0F2 is of micro-batch 2, they go from 0 to 1'),
    ('0F0 0B0 0F1 0B1 1F0', '1F0 is of stage 1, they go from 0 to 0'),
    ('0F0 0X0 0F1 0B1', '0X0 is no action: kinds are F B I W U'),
  ],
)
def test_reasons(text, reason):
  with pytest.raises(schedule.ScheduleError, match=reason):
    schedule.verify((_actions(text),), 1, 2)


def test_a_stage_that_nobody_has():
  built = (_actions('0F0 0B0'), _actions('2F0 2B0'))
  with pytest.raises(schedule.ScheduleError, match='no device has stage 1'):
    schedule.verify(built, 3, 1)


@pytest.mark.parametrize(
  'text, reason',
  [
    ('0F0@1 0B0@1 0F1 0B1', '0F0@1 takes version 1, newest is 0'),
    ('0F0 0B0 0U0@1 0F1@1 0B1', '0B1 takes other weights than 0F1@1'),
    ('0F0 0B0 0U0@2 0F1 0B1', '0U0@2 makes version 2, next is 1'),
    ('0F0 0U0@1 0B0 0F1 0B1', '0U0@1 waits for 0W0'),
  ],
)
def test_versions_of_weights(text, reason):
  with pytest.raises(schedule.ScheduleError, match=reason):
    schedule.verify((_actions(text),), 1, 2)


def test_weights_stashed_over_an_update_are_accepted():
  # As in PipeDream: micro-batch 1 goes back with the weights it came with.
  built = (_actions('0F0 0F1 0B0 0U0@1 0B1 0U1@2 0F2@2 0B2@2'),)
  schedule.verify(built, 1, 3)


def test_slices_of_a_sequence():
  # As in TeraPipe: forward from the first slice on, backward from the last.
  built = (
    (
      Action(0, 'F', 0, 0),
      Action(0, 'F', 0, 1),
      Action(0, 'B', 0, 1),
      Action(0, 'B', 0, 0),
    ),
  )
  schedule.verify(built, 1, 1, num_slices=2)
  with pytest.raises(schedule.ScheduleError, match=r'0B0 waits for 0I0\.1'):
    schedule.verify((built[0][:2] + built[0][:1:-1],), 1, 1, num_slices=2)


def test_more_in_flight_than_allowed():
  built = schedule.make('gpipe', 2, 4)
  schedule.verify(built, 2, 4, max_in_flight=4)
  with pytest.raises(
    schedule.ScheduleError, match='0F3 would bring device 0 to 4'
  ):
    schedule.verify(built, 2, 4, max_in_flight=3)
