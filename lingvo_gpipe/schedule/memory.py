"""What a device holds: activations, from forward to the end of backward."""

from collections.abc import Sequence

from lingvo_gpipe.schedule.action import (
  BACKWARD,
  FORWARD,
  WEIGHT_GRADIENT,
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


def _held_by_device(actions, sizes):
  now, during = 0, []
  for action in actions:
    if action.kind == FORWARD:
      now += sizes[action.stage]
    during.append(now)
    if action.kind in (BACKWARD, WEIGHT_GRADIENT):
      now -= sizes[action.stage]
  return during
