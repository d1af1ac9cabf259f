"""The least recomputation within a budget of bytes, for any chain of layers.

The dynamic program of Beaumont et al. (arXiv 1911.13214) for chains of unequal
layers, begun by a forward that has been run for every micro-batch in flight:

    C(s, t, m)   least time to go back over layers s to t - 1 if the input of s
                 is held, and m bytes are free:

      record      run s, keep its internals; then C(s + 1, t, m - what it keeps)
      checkpoint  run s to s' - 1, keep the input of s'; then
                  C(s', t, m - that input) and C(s, s', m)

    T(s, q)      the same from layer s to the end, if F has kept q bytes so far;
                 F runs anyway, so only C of what it has not recorded counts

What F keeps counts once for each micro-batch in flight, and must be known
before it is known what is left for B: the search tries every amount.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from lingvo_gpipe.checkpointing.remat import (
  Backward,
  Chain,
  Forward,
  Remat,
  keep_all,
  keep_inputs,
  peak_bytes,
  recomputed,
)

# Bytes are counted in units, sizes rounded up: a plan never exceeds its budget.
_UNITS = 320


@functools.lru_cache(maxsize=4096)
def cheapest(chain: Chain, in_flight: int, budget: int) -> Remat | None:
  """Returns the plan that recomputes least, None if there is none.

  Optimal up to the rounding of sizes to 1/320 of the budget.

  Args:
    chain: the layers.
    in_flight: micro-batches that are held at a time.
    budget: bytes for all of them, workspace included.
  """
  num_layers = len(chain.forward)
  everything = keep_all(num_layers)
  if peak_bytes(chain, everything, in_flight) <= budget:
    return everything
  found = [keep_inputs(num_layers)]
  planned = _Search(chain, in_flight, budget).plan() if budget > 0 else None
  if planned is not None:
    found.append(_merged(planned, chain, in_flight, budget))
  found = [p for p in found if peak_bytes(chain, p, in_flight) <= budget]
  return min(found, key=lambda p: _time(chain, p), default=None)


def _time(chain, remat):
  counts = recomputed(remat, len(chain.forward))
  return sum(f * n for f, n in zip(chain.forward, counts, strict=True))


class _Segment(NamedTuple):
  """C(s, t, m) by m, and for each m what to do first.

  The choice is 0 to record, or the length of the run up to the checkpoint.
  """

  time: np.ndarray
  choice: np.ndarray


class _Search:
  """The dynamic program for one chain; sizes in units."""

  def __init__(self, chain, in_flight, budget):
    self._unit = max(1, -(-budget // _UNITS))
    self._budget = budget // self._unit
    self._in_flight = in_flight
    self._forward = chain.forward
    self._totals = [0, *itertools.accumulate(chain.forward)]
    self._boundary, self._internal, self._workspace = (
      [-(-size // self._unit) for size in sizes]
      for sizes in (chain.boundary, chain.internal, chain.workspace)
    )
    self._num_layers = len(chain.forward)
    # Runs of equal layers share their segment.
    self._numbers, self._ids = {}, {}
    self._segments = {}

  def plan(self) -> Remat | None:
    """Returns the best plan, a step for each layer, or None."""
    best = math.inf, None
    for kept in self._amounts():
      time, path = self._from_start(kept)
      if time < best[0]:
        best = time, (kept, path)
    if best[1] is None:
      return None
    kept, path = best[1]
    return self._to_remat(kept, path)

  def _amounts(self):
    """Returns what F may keep of one micro-batch."""
    if self._in_flight == 1:
      return [self._budget]
    whole = sum(self._boundary) + sum(self._internal)
    most = min(self._budget // self._in_flight, whole)
    return range(self._boundary[0], most + 1)

  def _from_start(self, kept):
    """Returns T(0, input of the stage) and the way, if F keeps up to `kept`.

    The way is a list of (layer, length): length 0 records the layer, another
    leaves a segment that long to be recomputed.
    """
    left = self._budget - (self._in_flight - 1) * kept
    if left < 0 or self._boundary[0] > kept:
      return math.inf, None
    L = self._num_layers
    time = np.full((L + 1, kept + 1), math.inf)
    choice = np.zeros((L + 1, kept + 1), int)
    time[L] = 0.0
    amounts = np.arange(kept + 1)
    free = np.maximum(left - amounts, 0)
    for s in reversed(range(L)):
      need = self._internal[s] + self._workspace[s]
      options = [
        np.where(
          amounts + need <= left,
          self._after(time[s + 1], self._internal[s], s + 1),
          math.inf,
        )
      ]
      for stop in range(s + 1, L + 1):
        within = self._segment(s, stop).time[free]
        options.append(within + self._after(time[stop], 0, stop))
      options = np.array(options)
      choice[s] = options.argmin(0)
      time[s] = options.min(0)
    way, s, held = [], 0, self._boundary[0]
    whole = time[0][held]
    if whole == math.inf:
      return whole, None
    while s < L:
      length = int(choice[s][held])
      way.append((s, length, held))
      held += self._internal[s] if length == 0 else 0
      s += length or 1
      held += self._boundary[s] if s < L else 0
    return whole, way

  def _after(self, time, kept, s):
    """Returns time[q + kept + input of s] by q, infinite beyond the end."""
    shift = kept + (self._boundary[s] if s < self._num_layers else 0)
    shifted = np.full(len(time), math.inf)
    if shift < len(time):
      shifted[: len(time) - shift] = time[shift:]
    return shifted

  def _segment(self, s, t) -> _Segment:
    number = self._number(s, t)
    if number not in self._segments:
      self._segments[number] = self._solve(s, t)
    return self._segments[number]

  def _number(self, s, t):
    """Returns the same number for segments whose layers cost the same."""
    if (s, t) not in self._numbers:
      content = (
        self._forward[s],
        self._internal[s],
        self._workspace[s],
        self._boundary[s],
        self._number(s + 1, t) if s + 1 < t else None,
      )
      self._numbers[s, t] = self._ids.setdefault(content, len(self._ids))
    return self._numbers[s, t]

  def _solve(self, s, t) -> _Segment:
    memory = np.arange(self._budget + 1)
    fits = memory >= self._internal[s] + self._workspace[s]
    if t - s == 1:
      time = np.where(fits, self._forward[s], math.inf)
      return _Segment(time, np.zeros(len(memory), int))
    kept = self._internal[s] + self._boundary[s + 1]
    rest = _less(self._segment(s + 1, t).time, kept)
    options = [np.where(fits, self._forward[s] + rest, math.inf)]
    for middle in range(s + 1, t):
      forward = self._totals[middle] - self._totals[s]
      right = _less(self._segment(middle, t).time, self._boundary[middle])
      options.append(forward + right + self._segment(s, middle).time)
    options = np.array(options)
    return _Segment(options.min(0), options.argmin(0))

  def _to_remat(self, kept, way) -> Remat:
    left = self._budget - (self._in_flight - 1) * kept
    backward = []
    for s, length, held in reversed(way):
      if length == 0:
        backward.append(Backward(s, s + 1))
      else:
        backward += self._steps(s, s + length, left - held)
    recorded = tuple(s for s, length, _ in way if length == 0)
    checkpoints = tuple(s for s, _, _ in way if s)
    return Remat(checkpoints, recorded, tuple(backward))

  def _steps(self, s, t, free):
    """Returns the steps back over a segment whose input is held."""
    if t - s == 1:
      return [Backward(s, t)]
    length = int(self._segment(s, t).choice[free])
    if length == 0:
      rest = free - self._internal[s] - self._boundary[s + 1]
      return [
        Forward(s, s + 1, (s + 1,), (s,)),
        *self._steps(s + 1, t, rest),
        Backward(s, s + 1),
      ]
    middle = s + length
    return [
      Forward(s, middle, (middle,), ()),
      *self._steps(middle, t, free - self._boundary[middle]),
      *self._steps(s, middle, free),
    ]


def _less(time, kept):
  """Returns time[m - kept] by m, infinite where m is less than that."""
  shifted = np.full(len(time), math.inf)
  if kept < len(time):
    shifted[kept:] = time[: len(time) - kept]
  return shifted


def _merged(remat, chain, in_flight, budget) -> Remat:
  """Joins steps into fewer, where that costs neither time nor the budget."""
  steps = list(remat.backward)
  time = _time(chain, remat)
  position = 0
  while position + 1 < len(steps):
    joined = _join(steps[position], steps[position + 1])
    if joined is not None:
      shorter = [*steps[:position], joined, *steps[position + 2 :]]
      candidate = Remat(remat.checkpoints, remat.recorded, tuple(shorter))
      if (
        _time(chain, candidate) <= time
        and peak_bytes(chain, candidate, in_flight) <= budget
      ):
        steps = shorter
        position = max(position - 1, 0)
        continue
    position += 1
  return Remat(remat.checkpoints, remat.recorded, tuple(steps))


def _join(first, second):
  """Returns one step in place of two, None if they are not neighbours."""
  if isinstance(first, Forward) and isinstance(second, Forward):
    if first.stop == second.start:
      return Forward(
        first.start,
        second.stop,
        first.checkpoints + second.checkpoints,
        first.recorded + second.recorded,
      )
  elif isinstance(first, Backward) and isinstance(second, Backward):
    if first.start == second.stop:
      return Backward(second.start, first.stop)
  elif isinstance(first, Forward) and second.start == first.start:
    # A backward records by itself what nobody has recorded before it.
    if len(first.recorded) == first.stop - first.start <= second.stop:
      return second
  return None
