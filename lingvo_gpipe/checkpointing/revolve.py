"""Binomial checkpointing of equal layers (Griewank & Walther, ACM TOMS 26).

With S inputs held at a time and the internals of one layer, r sweeps reverse
C(S + r, S) layers. A chain of l of them takes r * l - C(S + r, S + 1) forwards
beyond the first of each, r the least number of sweeps that reaches l.
"""

import functools

from lingvo_gpipe.checkpointing.remat import Backward, Forward, Remat


def revolve(num_layers: int, num_checkpoints: int) -> Remat:
  """Returns the plan with the fewest forwards.

  F records the last layer, whose backward comes first.

  Args:
    num_layers: of the stage, all alike.
    num_checkpoints: inputs held at a time, that of the stage included.
  """
  checkpoints = []
  backward = [Backward(num_layers - 1, num_layers)]
  segments = []
  start, free = 0, num_checkpoints
  while start < num_layers - 1:
    size = _first_split(num_layers - start, free)
    segments.append((start, start + size, free))
    start, free = start + size, free - 1
    if free:
      checkpoints.append(start)
  for start, stop, slots in reversed(segments):
    backward += _steps(start, stop, slots)
  return Remat(tuple(checkpoints), (num_layers - 1,), _merged(backward))


@functools.cache
def _extra(num_layers, slots):
  """Returns (forwards, best split) to go back over layers not recorded.

  Args:
    num_layers: of the segment.
    slots: inputs that may be held, that of the segment included.
  """
  if num_layers == 1:
    return 1, None
  if slots == 1:
    return num_layers * (num_layers + 1) // 2, None
  return min(
    (j + _extra(num_layers - j, slots - 1)[0] + _extra(j, slots)[0], j)
    for j in range(1, num_layers)
  )


@functools.cache
def _from_f(num_layers, slots):
  """Returns (forwards, first split) for layers that F runs, the last recorded.

  What is recorded needs no input, so the last split takes no slot.
  """
  if num_layers == 1:
    return 0, None
  if slots == 1:
    return _extra(num_layers - 1, 1)[0], num_layers - 1
  return min(
    (_from_f(num_layers - j, slots - 1)[0] + _extra(j, slots)[0], j)
    for j in range(1, num_layers)
  )


def _first_split(num_layers, slots):
  return _from_f(num_layers, slots)[1]


def _steps(start, stop, slots):
  """Returns the steps back over a segment whose input is held."""
  if stop - start == 1:
    return [Backward(start, stop)]
  if slots == 1:
    steps = []
    for l in range(stop - 1, start, -1):
      steps += [Forward(start, l, (l,), ()), Backward(l, l + 1)]
    return [*steps, Backward(start, start + 1)]
  middle = start + _extra(stop - start, slots)[1]
  return [
    Forward(start, middle, (middle,), ()),
    *_steps(middle, stop, slots - 1),
    *_steps(start, middle, slots),
  ]


def _merged(steps):
  """Joins Forwards that follow one another into one with their checkpoints."""
  merged = []
  for step in steps:
    last = merged[-1] if merged else None
    if (
      isinstance(step, Forward)
      and isinstance(last, Forward)
      and last.stop == step.start
    ):
      checkpoints = last.checkpoints + step.checkpoints
      recorded = last.recorded + step.recorded
      merged[-1] = Forward(last.start, step.stop, checkpoints, recorded)
    else:
      merged.append(step)
  return tuple(merged)
