"""The vocabulary of schedules: actions, and lists of them."""

from typing import NamedTuple

FORWARD = 'F'
BACKWARD = 'B'


class Action(NamedTuple):
  """One thing that a stage does to one micro-batch, written `2F0`."""

  stage: int
  kind: str
  micro_batch: int

  def __str__(self):
    return f'{self.stage}{self.kind}{self.micro_batch}'


# For each device, its actions in the order in which it does them.
Schedule = tuple[tuple[Action, ...], ...]


def needs(action: Action, num_stages: int) -> list[Action]:
  """Returns the actions that must be done before `action` can start.

  A forward needs the stage before; a backward its own forward and the
  backward of the stage after.
  """
  k, i = action.stage, action.micro_batch
  if action.kind == FORWARD:
    return [Action(k - 1, FORWARD, i)] if k else []
  needed = [Action(k, FORWARD, i)]
  if k + 1 < num_stages:
    needed.append(Action(k + 1, BACKWARD, i))
  return needed
