"""Schedules are plain data with properties that can be checked."""

import subprocess
import sys

import pytest

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule.action import Action, needs

_CASES = [(k, m) for k in range(1, 9) for m in range(1, 13)]


@pytest.mark.parametrize('num_stages, num_micro_batches', _CASES)
def test_gpipe_does_everything_once_and_in_order(num_stages, num_micro_batches):
  devices = schedule.gpipe(num_stages, num_micro_batches)
  assert len(devices) == num_stages
  order = schedule.global_order(devices, num_stages)
  expected = {
    Action(k, kind, i)
    for k in range(num_stages)
    for kind in 'FB'
    for i in range(num_micro_batches)
  }
  assert len(order) == len(expected)
  assert set(order) == expected
  position = {action: n for n, action in enumerate(order)}
  for action in order:
    assert all(
      position[before] < position[action]
      for before in needs(action, num_stages)
    )
  for k, actions in enumerate(devices):
    assert {a.stage for a in actions} == {k}
    assert actions == tuple(a for a in order if a.stage == k)


def test_gpipe_fills_before_it_drains_but_in_the_last_stage():
  first, last = schedule.gpipe(2, 3)
  assert ' '.join(map(str, first)) == '0F0 0F1 0F2 0B0 0B1 0B2'
  assert ' '.join(map(str, last)) == '1F0 1B0 1F1 1B1 1F2 1B2'


def test_deadlock_is_reported():
  stuck = ((Action(0, 'B', 0), Action(0, 'F', 0)),)
  with pytest.raises(ValueError, match='deadlocks at 0B0'):
    schedule.global_order(stuck, 1)


def test_the_room_imports_no_tensorflow():
  code = (
    'import sys, lingvo_gpipe.schedule; '
    'sys.exit(any(m in sys.modules for m in ("tensorflow", "lingvo")))'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
