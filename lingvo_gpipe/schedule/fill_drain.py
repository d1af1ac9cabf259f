"""GPipe's fill-drain schedule (arXiv 1811.06965, section 2.3).

K = 4, M = 4. A digit is the micro-batch, one column a unit of time; a backward
takes two of them, and `.` is the bubble:

    stage 0  0123......00.11.22.33         0123   forwards
    stage 1  .0123...00.11.22.33..         00.11  backwards
    stage 2  ..012300.11.22.33....
    stage 3  ...000111222333......         000    forward and backward at once

Every stage but the last does all its forwards before its first backward. The
last one has nothing to wait for, so its backward follows its forward at once:
the step takes as long as otherwise, and the stage holds one micro-batch, not M.
"""

from collections.abc import Sequence

from lingvo_gpipe.schedule.action import BACKWARD, FORWARD, Action, Schedule


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
  """Returns the fill-drain schedule of K stages on K devices."""
  micro_batches = range(num_micro_batches)
  filling = tuple(
    tuple(Action(k, FORWARD, i) for i in micro_batches)
    + tuple(Action(k, BACKWARD, i) for i in micro_batches)
    for k in range(num_stages - 1)
  )
  last = num_stages - 1
  return (
    *filling,
    tuple(Action(last, kind, i) for i in micro_batches for kind in 'FB'),
  )


def forward_only(device_of: Sequence[int], num_micro_batches: int) -> Schedule:
  """Returns the schedule of an evaluation: forwards alone.

  Args:
    device_of: the device of each stage.
    num_micro_batches: M.
  """
  num_stages = len(device_of)
  devices = [[] for _ in range(max(device_of) + 1)]
  # Stage k does micro-batch i at clock k + i, wherever it is.
  for clock in range(num_stages + num_micro_batches - 1):
    for k, device in enumerate(device_of):
      if 0 <= clock - k < num_micro_batches:
        devices[device].append(Action(k, FORWARD, clock - k))
  return tuple(tuple(actions) for actions in devices)
