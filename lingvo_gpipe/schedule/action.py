"""The vocabulary of schedules: actions, lists of them, and what waits for what.

F  forward                                    2F0    stage 2, micro-batch 0
B  backward, whole                            2F0.1  its sequence slice 1
I  backward, gradients of the inputs alone    2F0@3  with the weights after
W  backward, gradients of the weights alone          three updates
U  update of the weights
"""

from typing import NamedTuple

FORWARD = 'F'
BACKWARD = 'B'
INPUT_GRADIENT = 'I'
WEIGHT_GRADIENT = 'W'
UPDATE = 'U'
KINDS = 'FBIWU'


class Action(NamedTuple):
  """One thing that a stage does to one micro-batch, written `2F0`.

  Attributes:
    stage: k.
    kind: one of KINDS.
    micro_batch: i; an update is one after micro-batch i.
    slice: s, of the sequence.
    version: how many updates the weights have seen that F, B, I or W take; for
      U, how many they have seen after it.
  """

  stage: int
  kind: str
  micro_batch: int
  slice: int = 0
  version: int = 0

  def __str__(self):
    slice_text = f'.{self.slice}' if self.slice else ''
    version_text = f'@{self.version}' if self.version else ''
    return (
      f'{self.stage}{self.kind}{self.micro_batch}{slice_text}{version_text}'
    )


# For each device, its actions in the order in which it does them.
Schedule = tuple[tuple[Action, ...], ...]


def num_stages(schedule: Schedule) -> int:
  """Returns K: one more than the highest stage that has an action."""
  return 1 + max(a.stage for actions in schedule for a in actions)


def placement(schedule: Schedule) -> tuple[int, ...]:
  """Returns the device of each stage of a verified schedule."""
  device_of = {
    a.stage: d for d, actions in enumerate(schedule) for a in actions
  }
  return tuple(device_of[k] for k in range(len(device_of)))


def effects(action: Action) -> list[Action]:
  """Returns what is done after `action`: a B is an I and a W at once."""
  done = action._replace(version=0)
  if action.kind == BACKWARD:
    return [done._replace(kind=kind) for kind in 'IW']
  return [done]


def needs(action: Action, num_stages: int, num_slices: int = 1) -> list[Action]:
  """Returns the effects that must be there before `action` can start.

  F of stage k   F of k-1; of the slice before too (arXiv 2102.07988)
  I, B           F of k, all slices; I of k+1, and of the slice after
  W              I of the same
  U              W of all micro-batches up to this one
  """
  k, i, s = action.stage, action.micro_batch, action.slice
  if action.kind == FORWARD:
    needed = [Action(k - 1, FORWARD, i, s)] if k else []
    return needed + ([Action(k, FORWARD, i, s - 1)] if s else [])
  if action.kind == WEIGHT_GRADIENT:
    return [Action(k, INPUT_GRADIENT, i, s)]
  if action.kind == UPDATE:
    return [
      Action(k, WEIGHT_GRADIENT, j, t)
      for j in range(i + 1)
      for t in range(num_slices)
    ]
  needed = [Action(k, FORWARD, i, num_slices - 1)]
  if k + 1 < num_stages:
    needed.append(Action(k + 1, INPUT_GRADIENT, i, s))
  if s + 1 < num_slices:
    needed.append(Action(k, INPUT_GRADIENT, i, s + 1))
  return needed
