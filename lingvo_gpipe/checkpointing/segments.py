"""The least time to go back over a segment of layers, for any free memory.

The dynamic program of Beaumont et al. (arXiv 1911.13214) for chains of unequal
layers. C(s, t, m) is the least time to go back over layers s to t - 1 if the
input of s is held, and m units of memory are free; the first thing to do is

    layer        s    s+1   ...   t-1
    record      ====>                    run s, keep its internals; then
                     <-------------      C(s + 1, t, m - what it keeps)
                <====
    checkpoint  --------->o              run s to s' - 1, keep the input of s'
                          <--------      C(s', t, m - that input)
                <--------                C(s, s', m)
"""

import itertools
import math

import numpy as np

from lingvo_gpipe.checkpointing.remat import Backward, Chain, Forward


class Segments:
  """C of all segments of a chain, each solved when it is first asked for.

  Attributes:
    boundary: units of the input of each layer.
    kept: units of the internals of each layer and the input of the next.
    needed: units of the internals of each layer and its workspace.
  """

  def __init__(self, chain: Chain, unit: int, most: int):
    """Prepares; sizes are rounded up, what goes together as one.

    Args:
      chain: the layers.
      unit: bytes.
      most: the greatest m, in units.
    """
    # What crosses into nothing, the output of the stage, is not for it to keep.
    crossing = (*chain.boundary, 0)
    self.boundary = _rounded(unit, crossing)
    self.kept = _rounded(unit, chain.internal, crossing[1:])
    self.needed = _rounded(unit, chain.internal, chain.workspace)
    self._forward = chain.forward
    self._totals = [0, *itertools.accumulate(chain.forward)]
    self._most = most
    # Runs of equal layers share their segment.
    self._numbers, self._ids = {}, {}
    self._solved = {}

  def time(self, s: int, t: int) -> np.ndarray:
    """Returns C(s, t, m) by m, infinite where it cannot be done."""
    number = self._number(s, t)
    if number not in self._solved:
      self._solved[number] = self._solve(s, t)
    return self._solved[number]

  def steps(self, s: int, t: int, free: int) -> list[Forward | Backward]:
    """Returns steps of one layer each that go back in time C(s, t, free)."""
    steps = []
    pending = [(s, t, free)]
    while pending:
      s, t, free = pending.pop()
      if t - s == 1:
        steps.append(Backward(s, t))
        continue
      middle = self._first_checkpoint(s, t, free)
      if middle is None:
        steps.append(Forward(s, s + 1, (s + 1,), (s,)))
        pending += [(s, s + 1, free), (s + 1, t, free - self.kept[s])]
      else:
        steps.append(Forward(s, middle, (middle,), ()))
        pending += [
          (s, middle, free),
          (middle, t, free - self.boundary[middle]),
        ]
    return steps

  def _first_checkpoint(self, s, t, free):
    """Returns s', or None to record s, for the best way back with `free`."""
    best, found = math.inf, None
    if self.kept[s] <= free >= self.needed[s]:
      best = self._forward[s] + self.time(s + 1, t)[free - self.kept[s]]
    for middle in range(s + 1, t):
      left = free - self.boundary[middle]
      if left >= 0:
        time = self.time(middle, t)[left] + self.time(s, middle)[free]
        time += self._totals[middle] - self._totals[s]
        if time < best:
          best, found = time, middle
    return found

  def _number(self, s, t):
    """Returns the same number for segments whose layers cost the same."""
    if (s, t) not in self._numbers:
      content = self._forward[s], self.needed[s]
      if s + 1 < t:
        content += self.kept[s], self.boundary[s + 1], self._number(s + 1, t)
      self._numbers[s, t] = self._ids.setdefault(content, len(self._ids))
    return self._numbers[s, t]

  def _solve(self, s, t):
    size = self._most + 1
    best = np.full(size, math.inf)
    if t - s == 1:
      best[self.needed[s] :] = self._forward[s]
      return best
    enough = max(self.kept[s], self.needed[s])
    if enough < size:
      rest = self.time(s + 1, t)
      best[enough:] = rest[enough - self.kept[s] : size - self.kept[s]]
      best += self._forward[s]
    for middle in range(s + 1, t):
      kept = self.boundary[middle]
      if kept < size:
        time = self.time(middle, t)[: size - kept] + self.time(s, middle)[kept:]
        time += self._totals[middle] - self._totals[s]
        np.minimum(best[kept:], time, out=best[kept:])
    return best


def _rounded(unit, *sizes):
  return [-(-sum(together) // unit) for together in zip(*sizes, strict=True)]
