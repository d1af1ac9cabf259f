"""Finds the contiguous cut whose slowest stage is fastest, by bisection.

The test for one bottleneck T walks forward over the stages and keeps the ends
that the stages so far can reach, as disjoint ranges. There are gaps where a
layer is too long for its device. Costs 1 1 4 1 1, K = 3, T = 3, and stage 1 is
twice as fast, so that it takes costs up to 6:

    stage  starts  too long alone  longest from last start  ends
    0      0                       [1 1]                    1 2
    1      1 2                     [4 1]                    2 3 4
    2      2 3 4   2: [4]          [1]                      4 5

5 is reached: there is a cut within T, for one [1 1][4][1 1], whose time is 2.

Starts whose own layer is not too long fall into runs. The run a..b reaches the
ends a + 1 .. furthest(b) without a gap: an end up to b with the one layer that
is before it, an end after b with a part of the longest stage from b.

Only the longest stages are looked at; other layers alone are presumed short
enough. The walk back, which picks one start for each stage, looks at the stage
that it picks. Where a layer alone is too long after all, that is remembered,
and the walk forward is done again from there.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class StageTimes:
  """How long a stage takes: any function that grows with the range.

  Attributes:
    time: of stage k with the layers start .. stop - 1; inf if impossible.
    num_layers: how many layers there are.
    num_stages: how many stages there are.
    seen: for each stage the layers looked at alone, and their times.
  """

  time: Callable[[int, int, int], float]
  num_layers: int
  num_stages: int
  seen: dict[int, dict[int, float]] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(dict)
  )

  def within(self, k: int, start: int, stop: int, most: float) -> bool:
    """Returns whether the stage takes at most `most`."""
    time = self.time(k, start, stop)
    if stop - start == 1:
      self.seen[k][start] = time
    return time <= most

  def furthest(self, k: int, start: int, most: float, limit: int) -> int:
    """Returns the last stop within `most`.

    Args:
      k: the stage.
      start: its first layer; also what is returned if that is too long.
      most: the time.
      limit: no stop after this one.
    """
    return last_true(
      start, limit, lambda stop: self.within(k, start, stop, most)
    )

  def least_over(self, k: int, stages: list[range], most: float) -> float:
    """Returns the least time over `most` that stage k takes with any."""
    times = (self.time(k, s.start, s.stop) for s in stages)
    return min((time for time in times if time > most), default=math.inf)

  def too_long(
    self, k: int, layers: range, most: float
  ) -> tuple[list[int], float]:
    """Returns those known to be too long alone, in order, and the least time.

    That time may be less, but is over `most`.
    """
    times = {
      l: time
      for l, time in self.seen[k].items()
      if l in layers and not time <= most
    }
    return sorted(times), min(times.values(), default=math.inf)

  def even(self, k: int, stop: int) -> int:
    """Returns the start of stage k that evens out the stages 0 .. k."""
    return stop - round(stop / (k + 1))


def last_true(known: int, limit: int, predicate: Callable[[int], bool]) -> int:
  """Returns the last number in (known, limit] of which it is true, or known.

  Args:
    known: of which it is taken to be true.
    limit: the last number.
    predicate: true up to some number and false from there on.
  """
  return (
    bisect.bisect_left(
      range(limit + 1), True, lo=known + 1, key=lambda n: not predicate(n)
    )
    - 1
  )


def search(times: StageTimes, most: float) -> tuple[range, ...] | None:
  """Returns the best cut among those within `most`, or None if there is none.

  The optimum is one of the times that stages can take. It is never below `low`
  and never above `high`, which is the time of a cut in hand. A failed test
  raises `low` to the next time with which anything could be different, so they
  meet, whatever the rounding.
  """
  best, _ = _attempt(times, most)
  if best is None:
    return None
  low, high = 0, _slowest(times, best)
  while low < high:
    middle = low + (high - low) / 2
    if not low < middle < high:  # Floats that are adjacent, or large integers.
      middle = low
    stages, above = _attempt(times, middle)
    if stages is None:
      low = above
    else:
      best, high = stages, _slowest(times, stages)
  return best


def _slowest(times, stages):
  return max(times.time(k, s.start, s.stop) for k, s in enumerate(stages))


def _attempt(times, most):
  """Returns a cut within `most`; or None and a higher bound for any cut."""
  # reached[k]: where stage k may start, as disjoint ranges in order.
  reached = [[range(1)], *([] for _ in range(times.num_stages))]
  first, stages, above = 0, [], math.inf
  while True:
    for k in range(first, times.num_stages):
      ends, more = _reach(times, k, reached[k], most)
      above = min(above, more)
      if not ends:
        return None, above
      if ends == reached[k + 1]:
        break  # The later ones are as they were, too.
      reached[k + 1] = ends
    if times.num_layers not in reached[-1][-1]:
      return None, above
    # The last stage is the first one picked. Those after stage k still hold.
    del stages[times.num_stages - 1 - k :]
    first = _walk_back(times, reached, stages, most)
    if first is None:
      return tuple(reversed(stages)), above


def _reach(times, k, starts, most):
  """Returns the ends of stage k, and the least time that could add others."""
  # Leaves a layer for each of the stages that follow.
  limit = times.num_layers - (times.num_stages - 1 - k)
  ends, longer, above = [], [], math.inf
  for interval in starts:
    gaps, more = times.too_long(k, interval, most)
    above = min(above, more)
    first = interval.start
    for gap in [*gaps, interval.stop]:
      last, stop = gap, gap
      while stop == last and last > first:
        last -= 1
        stop = times.furthest(k, last, most, limit)
        if stop < limit:
          longer.append(range(last, stop + 1))
      if stop > last:
        if ends and first < ends[-1].stop:
          ends[-1] = range(ends[-1].start, stop + 1)
        else:
          ends.append(range(first + 1, stop + 1))
      first = gap + 1
  return ends, min(above, times.least_over(k, longer, most))


def _walk_back(times, reached, stages, most):
  """Adds to `stages` those before; returns the first one with a wrong end."""
  stop = stages[-1].start if stages else times.num_layers
  for k in reversed(range(times.num_stages - len(stages))):
    start = _pick_start(times, k, reached[k], stop, most)
    if start is None:
      return k
    stages.append(range(start, stop))
    stop = start
  return None


def _pick_start(times, k, starts, stop, most):
  """Returns the start that evens the stages out best; None if `stop` is wrong.

  If so, the layer before `stop` is too long alone, and that is now remembered.
  """
  even = times.even(k, stop)
  start = min(
    (
      min(max(even, interval.start), interval.stop - 1, stop - 1)
      for interval in starts
      if interval.start < stop
    ),
    key=lambda start: abs(start - even),
  )
  if times.within(k, start, stop, most):
    return start
  shortest = stop - 1
  earliest = bisect.bisect_left(
    range(shortest),
    True,
    lo=min(start + 1, shortest),
    key=lambda start: times.within(k, start, stop, most),
  )
  start = next(
    max(interval.start, earliest)
    for interval in starts
    if interval.stop > earliest
  )
  return start if times.within(k, start, stop, most) else None
