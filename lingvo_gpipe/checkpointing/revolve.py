"""Binomial checkpointing of equal layers (Griewank & Walther, ACM TOMS 26).

With S inputs held at a time and the internals of one layer, r sweeps reverse
C(S + r, S) layers. A chain of l of them takes r * l - C(S + r, S + 1) forwards
beyond the first of each, r the least number of sweeps that reaches l. Ten
layers, S = 3, so r = 2 (o is an input that is held, = what is recorded):

    layer   0   1   2   3   4   5   6   7   8   9
    F       o---------------o-----------o-------===   Backward(9, 10)
                                        o---o===      Backward(8, 9), then 7
                            o---o---o===              and with what 4 keeps
            o---o---o---o===                          and with what 0 keeps
"""

import math

from lingvo_gpipe.checkpointing.remat import Backward, Forward, Remat


def revolve(num_layers: int, num_checkpoints: int) -> Remat:
  """Returns the plan with the fewest forwards (ACM TOMS 26, algorithm 799).

  F records the last layer, whose backward comes first.

  Args:
    num_layers: of the stage, all alike.
    num_checkpoints: inputs held at a time, that of the stage included; as many
      as there are layers keep every input.

  Raises:
    ValueError: there is not one checkpoint.
  """
  if num_checkpoints < 1:
    raise ValueError(f'{num_checkpoints} checkpoints: one is needed at least')
  # The last segment is the layer that F records.
  *segments, (last, _, _) = whole = _segments(0, num_layers, num_checkpoints)
  checkpoints = tuple(start for start, _, slots in whole[1:] if slots)
  backward = (Backward(last, num_layers), *_steps(segments))
  return Remat(checkpoints, (last,), backward)


def _segments(start, stop, slots):
  """Returns (start, stop, slots) of the segments between inputs to be held.

  Each may use its slots when it is gone back over, its own input in one of
  them. The last is a single layer, whose input needs none: it is at hand.
  """
  segments = []
  while stop - start > 1:
    middle = start + _split(stop - start, slots)
    segments.append((start, middle, slots))
    start, slots = middle, slots - 1
  return [*segments, (start, stop, slots)]


def _split(num_layers, slots):
  """Returns how far from the first checkpoint the second one is best put.

  What is before it needs one sweep less at most, what is behind it one slot
  less.
  """
  r = 1
  while math.comb(slots + r, slots) < num_layers:
    r += 1
  behind = math.comb(slots + r - 1, slots - 1)
  before = math.comb(slots + r - 2, slots)
  return max(num_layers - behind, before, 1)


def _steps(segments):
  """Returns the steps back over segments whose inputs are held, last first."""
  steps = []
  pending = list(segments)
  while pending:
    start, stop, slots = pending.pop()
    if stop - start == 1:
      steps.append(Backward(start, stop))
    else:
      parts = _segments(start, stop, slots)
      kept = tuple(part[0] for part in parts[1:])
      steps.append(Forward(start, kept[-1], kept, ()))
      pending += parts
  return steps
