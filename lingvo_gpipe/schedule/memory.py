"""What a device holds: activations, from forward to the end of backward."""

import itertools
from collections.abc import Callable, Sequence

from lingvo_gpipe.schedule.action import (
  BACKWARD,
  FORWARD,
  INPUT_GRADIENT,
  WEIGHT_GRADIENT,
  Action,
  Schedule,
  num_stages,
)


def held(
  schedule: Schedule, activation_bytes: Sequence[float] | None = None
) -> list[list[float]]:
  """Returns for each device what it holds during each of its actions.

  Args:
    schedule: verified.
    activation_bytes: of each stage, what it holds of one micro-batch (and
      slice) in flight; None to count micro-batches.
  """
  sizes = activation_bytes or [1] * num_stages(schedule)
  return [_held_by_device(actions, sizes) for actions in schedule]


def peaks(
  schedule: Schedule, activation_bytes: Sequence[float] | None = None
) -> list[float]:
  """Returns for each device the most that it ever holds; see `held`."""
  return [max(row, default=0) for row in held(schedule, activation_bytes)]


def stage_peaks(schedule: Schedule) -> list[int]:
  """Returns for each stage how many micro-batches it holds at most."""
  now = [0] * num_stages(schedule)
  most = list(now)
  for action in itertools.chain(*schedule):
    k = action.stage
    if action.kind == FORWARD:
      now[k] += 1
      most[k] = max(most[k], now[k])
    elif action.kind in (BACKWARD, WEIGHT_GRADIENT):
      now[k] -= 1
  return most


def device_bytes(
  schedule: Schedule,
  kept: Callable[[int, int], float],
  waiting: Callable[[int, int], float],
  working: Callable[[Action], float],
) -> list[float]:
  """Returns the most bytes of activations that each device ever holds.

  Args:
    schedule: verified.
    kept: of (k, i): what stage k holds of micro-batch i from F to B or I.
    waiting: of (k, i): likewise between I and W.
    working: what an action holds beside that while it runs.
  """
  return [_most_bytes(actions, kept, waiting, working) for actions in schedule]


def _most_bytes(actions, kept, waiting, working):
  now = most = 0
  for action in actions:
    place = action.stage, action.micro_batch
    if action.kind == FORWARD:
      now += kept(*place)
    most = max(most, now + working(action))
    if action.kind == INPUT_GRADIENT:
      now += waiting(*place)
      most = max(most, now)
    if action.kind in (BACKWARD, INPUT_GRADIENT):
      now -= kept(*place)
    if action.kind == WEIGHT_GRADIENT:
      now -= waiting(*place)
  return most


def _held_by_device(actions, sizes):
  now, during = 0, []
  for action in actions:
    if action.kind == FORWARD:
      now += sizes[action.stage]
    during.append(now)
    if action.kind in (BACKWARD, WEIGHT_GRADIENT):
      now -= sizes[action.stage]
  return during
