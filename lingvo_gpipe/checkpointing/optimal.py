"""The least recomputation within a budget of bytes, for any chain of layers.

F is run for every micro-batch in flight in any case; the plan says which layers
it records, and of which it keeps the input to go back from:

    layer       0     1     2     3     4     5
    F         o---- ----- o==== ===== o---- -----
                                      <----------   C(4, 6, left - inputs 0, 2,
                          <==== =====                   4, internals of 2, 3)
              <----------                           C(0, 2, left - input 0)

    T(s, q)   the least time to go back from the end to layer s, if F has kept
              q of the layers before and the input of s: T of the layer after if
              s is recorded, T(t, q') + C(s, t, left - q) if s to t - 1 are not

C is in `segments`. F keeps as much of each other micro-batch, so what is left
for this one, left = budget - (in_flight - 1) * K, depends on the K that F keeps
in the end. The search is best first over intervals of K: with as much left as
the lowest K leaves, and as much kept as the highest lets, T is a bound from
below for all of them, and the answer once its own plan keeps no more than the
lowest. Else the interval is halved.
"""

import functools
import heapq
import math

import numpy as np

from lingvo_gpipe.checkpointing.merging import merged
from lingvo_gpipe.checkpointing.remat import (
  Backward,
  Chain,
  Remat,
  keep_all,
  keep_inputs,
  peak_bytes,
  recomputed,
)
from lingvo_gpipe.checkpointing.segments import Segments

# If the budget has so many units that divide all sizes, the plan is optimal.
_EXACT_UNITS = 4000
# Else sizes are rounded up to so many units of the budget,
_UNITS = 1000
# and it is tried so often whether more units than there are fit nevertheless.
_ROUNDS = 4


@functools.lru_cache(maxsize=4096)
def cheapest(chain: Chain, in_flight: int, budget: int) -> Remat | None:
  """Returns the plan that recomputes least, None if none fits.

  It is the optimum (arXiv 1911.13214, with several micro-batches in flight) if
  the budget is at most 4000 times the greatest common divisor of all sizes.
  Else sizes are rounded: the plan still fits, and is near the optimum; one that
  leaves less of the budget free than the rounding takes may be missed.

  Args:
    chain: the layers.
    in_flight: micro-batches that are held at a time, at least one.
    budget: bytes for all of them, workspace included.
  """
  num_layers = len(chain.forward)

  def fits(remat):
    return peak_bytes(chain, remat, in_flight) <= budget

  if fits(everything := keep_all(num_layers)):
    return everything
  found = [keep_inputs(num_layers), *_candidates(chain, in_flight, budget)]
  best = min(filter(fits, found), key=lambda p: _time(chain, p), default=None)
  return best and merged(chain, best, in_flight)


def _time(chain, remat):
  counts = recomputed(remat, len(chain.forward))
  return sum(f * n for f, n in zip(chain.forward, counts, strict=True))


def _candidates(chain, in_flight, budget):
  """Yields plans, of which some may not fit."""
  if budget < 1:
    return
  unit = math.gcd(*chain.boundary, *chain.internal, *chain.workspace)
  is_exact = budget <= unit * _EXACT_UNITS
  if not is_exact:
    unit = -(-budget // _UNITS)
  units = most = budget // unit
  if not is_exact:
    # Rounding up takes at most so much, which may be had again.
    crossing = (*chain.boundary[1:], 0)
    pairs = zip(chain.internal, crossing, strict=True)
    added = sum(-(i + b) % unit for i, b in pairs)
    most = min(units + in_flight * added // unit, 2 * units)
  search = _Search(chain, in_flight, unit, most)
  for _ in range(1 if is_exact else _ROUNDS):
    found = search.best(units)
    spare = most - units
    if found is not None:
      yield found
      spare = (budget - peak_bytes(chain, found, in_flight)) // unit
    units = min(units + spare, most)


class _Search:
  """The plans of one chain, sizes in units."""

  def __init__(self, chain, in_flight, unit, most):
    self._segments = Segments(chain, unit, most)
    self._num_layers = len(chain.forward)
    self._others = in_flight - 1

  def best(self, budget) -> Remat | None:
    """Returns the plan that recomputes least, a step for each layer."""
    inputs = self._segments.boundary[0]
    everything = inputs + sum(self._segments.kept)
    most = min(everything, budget // (self._others + 1))
    if most < inputs:
      return None
    intervals = []

    def add(low, high):
      if low <= high:
        times = self._from_layers(budget - self._others * low, high)
        bound = times[0][inputs]
        if bound < math.inf:
          heapq.heappush(intervals, (bound, high - low, low, high, times))

    add(inputs, most)
    while intervals:
      _, _, low, high, times = heapq.heappop(intervals)
      left = budget - self._others * low
      way, kept = self._way(times, left)
      if kept <= low or not self._others:
        return self._to_remat(way, left)
      middle = (low + high) // 2
      add(low, middle)
      add(middle + 1, high)
    return None

  def _from_layers(self, left, most):
    """Returns T(s, q) for each s by q up to `most`, which is at most `left`."""
    L = self._num_layers
    times = np.full((L + 1, most + 1), math.inf)
    # T(t, q + input of t) by q.
    arrived = np.full((L + 1, most + 1), math.inf)
    times[L] = arrived[L] = 0.0
    for s in reversed(range(L)):
      within = [
        self._segments.time(s, stop)[left - most : left + 1]
        for stop in range(s + 1, L + 1)
      ]
      # By q upwards what is left goes down.
      options = np.array(within)[:, ::-1] + arrived[s + 1 :]
      best = options.min(0, out=times[s])
      kept = self._segments.kept[s]
      end = min(left - self._segments.needed[s], most - kept) + 1
      if end > 0:
        after = times[s + 1][kept : kept + end]
        np.minimum(best[:end], after, out=best[:end])
      kept = self._segments.boundary[s]
      if kept <= most:
        arrived[s, : most + 1 - kept] = best[kept:]
    return times

  def _way(self, times, left):
    """Returns the way that takes times[0], and what F keeps on it.

    The way is a list of (s, t, kept): t is None if layer s is recorded, else
    layers s to t - 1 are gone back over with `kept` units kept.
    """
    segments = self._segments
    L = self._num_layers
    way = []
    s, kept = 0, segments.boundary[0]
    while s < L:
      options = []
      after = kept + segments.kept[s]
      if after < len(times[s]) and kept + segments.needed[s] <= left:
        options.append((times[s + 1][after], None, after))
      for stop in range(s + 1, L + 1):
        after = kept + self._boundary(stop)
        if after < len(times[s]):
          time = segments.time(s, stop)[left - kept] + times[stop][after]
          options.append((time, stop, after))
      _, stop, after = min(options, key=lambda option: option[0])
      way.append((s, stop, kept))
      s, kept = s + 1 if stop is None else stop, after
    return way, kept

  def _boundary(self, s):
    return self._segments.boundary[s] if s < self._num_layers else 0

  def _to_remat(self, way, left):
    backward = []
    for s, stop, kept in reversed(way):
      if stop is None:
        backward.append(Backward(s, s + 1))
      else:
        backward += self._segments.steps(s, stop, left - kept)
    recorded = tuple(s for s, stop, _ in way if stop is None)
    return Remat(tuple(s for s, _, _ in way[1:]), recorded, tuple(backward))
