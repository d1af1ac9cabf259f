"""Cuts a list of layers into contiguous stages whose slowest is fastest.

costs    3 1 1 1 2 2 2          K = 3, bottleneck 4: the optimum
stages  [3 1][1 1 2][2 2]
"""

import bisect
import dataclasses
import functools
import itertools
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from lingvo_gpipe.partition import search


class DoesNotFit(ValueError):
  """There is no cut whose stages all fit."""


def cut(
  costs: Sequence[float],
  num_stages: int,
  *,
  speeds: Sequence[float] | None = None,
  fits: Callable[[int, int, int], bool] | None = None,
) -> tuple[range, ...]:
  """Returns for each stage the range of its layers; no stage is empty.

  Minimises the time of the slowest stage over all contiguous cuts, exactly:
  sums are not rounded. Among the optimal cuts it returns an even one; equal
  layers on equal devices differ by one at most.

  Args:
    costs: of each layer, in any unit.
    num_stages: how many stages to cut.
    speeds: of the device of each stage, cost per time; None if all are equal.
    fits: takes k, start and stop; returns whether the layers start .. stop - 1
      fit on the device of stage k. Where a range fits, so must its parts. It
      is asked about no range twice.

  Raises:
    DoesNotFit: there is no cut of which each stage fits.
    ValueError: there are fewer layers than stages, or fewer than one stage; a
      cost is negative or not finite; a speed is not positive or not finite.
  """
  _check_lengths(len(costs), num_stages)
  if speeds is None:
    speeds = [1] * num_stages
  if len(speeds) != num_stages:
    raise ValueError(f'{len(speeds)} speeds for {num_stages} stages')
  for l, cost in enumerate(costs):
    if not 0 <= cost < math.inf:
      raise ValueError(f'the cost of layer {l} is {cost}')
  for k, speed in enumerate(speeds):
    if not 0 < speed < math.inf:
      raise ValueError(f'the speed of stage {k} is {speed}')
  sums = _sums(costs, speeds, fits and functools.cache(fits))
  return _search(
    sums, max(sums.time(k, 0, len(costs)) for k in range(num_stages))
  )


def cut_by(
  stage_cost: Callable[[int, int, int], float],
  num_layers: int,
  num_stages: int,
) -> tuple[range, ...]:
  """Returns the cut whose slowest stage is fastest, as `cut`, for any cost.

  Args:
    stage_cost: takes k, start and stop; returns the cost of stage k with the
      layers start .. stop - 1: at least 0, never less for a longer range, and
      inf where it does not fit.
    num_layers: how many layers there are.
    num_stages: how many stages to cut.

  Raises:
    DoesNotFit: there is no cut whose stages all have finite costs.
    ValueError: there are fewer layers than stages, or fewer than one stage.
  """
  _check_lengths(num_layers, num_stages)
  stage_cost = functools.cache(stage_cost)
  times = search.StageTimes(stage_cost, num_layers, num_stages)
  return _search(times, sys.float_info.max)


def _stage_times(
  costs: Sequence[float],
  stages: Sequence[range],
  speeds: Sequence[float] | None = None,
) -> list[float]:
  """Returns the time of each stage: the sum of its costs over its speed."""
  if speeds is None:
    speeds = [1] * len(stages)
  return [
    math.fsum(costs[l] for l in stage) / speed
    for stage, speed in zip(stages, speeds, strict=True)
  ]


def bottleneck(
  costs: Sequence[float],
  stages: Sequence[range],
  speeds: Sequence[float] | None = None,
) -> float:
  """Returns the time of the slowest stage, what `cut` minimises."""
  return max(_stage_times(costs, stages, speeds))


def imbalance(
  costs: Sequence[float],
  stages: Sequence[range],
  speeds: Sequence[float] | None = None,
) -> float:
  """Returns the time of the slowest stage over the mean; 1 if all are equal."""
  times = _stage_times(costs, stages, speeds)
  return max(times) * len(times) / math.fsum(times) if any(times) else 1.0


def _check_lengths(num_layers, num_stages):
  if not 1 <= num_stages <= num_layers:
    raise ValueError(f'cannot cut {num_layers} layers into {num_stages} stages')


def _search(times, most):
  stages = search.search(times, most)
  if stages is None:
    raise DoesNotFit(
      f'no cut of {times.num_layers} layers into {times.num_stages} stages fits'
    )
  return stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sums(search.StageTimes):
  """Sums of costs over speeds, as integers and fractions: nothing is rounded.

  Attributes:
    totals: of the costs of the first layers, in units.
    rates: of each stage, units per time.
    fits: see `cut`.
    ascending: the costs in units, sorted.
    ranks: where in `ascending` the cost of each layer first stands.
    weights: like totals, but a layer also counts a little for itself.
    shares: of stages 0 .. k, the part that is done before stage k.
    bounds: of each stage the time last asked about, what it is in units, and
      what `too_long` makes of it.
  """

  totals: list[int]
  rates: list[Fraction]
  fits: Callable[[int, int, int], bool] | None
  ascending: list[int]
  ranks: np.ndarray
  weights: list[int]
  shares: list[Fraction]
  bounds: dict[int, tuple] = dataclasses.field(default_factory=dict)

  def within(self, k, start, stop, most):
    units, _, _ = self._bound(k, most)
    cost = self.totals[stop] - self.totals[start]
    return cost <= units and self._fits(k, start, stop)

  def furthest(self, k, start, most, limit):
    units, _, _ = self._bound(k, most)
    until = self.totals[start] + units
    stop = bisect.bisect_right(self.totals, until, start + 1, limit + 1) - 1
    if stop == start or self._fits(k, start, stop):
      return stop
    return search.last_true(
      start, stop - 1, lambda stop: self._fits(k, start, stop)
    )

  def least_over(self, k, stages, most):
    units, _, _ = self._bound(k, most)
    costs = (self.totals[s.stop] - self.totals[s.start] for s in stages)
    least = min((cost for cost in costs if cost > units), default=None)
    return math.inf if least is None else least / self.rates[k]

  def too_long(self, k, layers, most):
    unfit, least = super().too_long(k, layers, most)
    _, rank, longer = self._bound(k, most)
    if rank == self.num_layers:
      return unfit, least
    ranks = self.ranks[layers.start : layers.stop]
    costly = np.flatnonzero(ranks >= rank) + layers.start
    return sorted({*unfit, *costly.tolist()}), min(least, longer)

  def even(self, k, stop):
    weight = round(self.weights[stop] * self.shares[k])
    above = bisect.bisect_left(self.weights, weight)
    return min(
      range(max(above - 1, 0), above + 1),
      key=lambda start: abs(self.weights[start] - weight),
    )

  def _bound(self, k, most):
    """Returns `most` in units, the rank and the time of the next layer."""
    # Fractions are slow, and one time is asked about for every start.
    last, *bound = self.bounds.get(k, [None])
    if last is not most:
      units = math.floor(most * self.rates[k])
      rank = bisect.bisect_right(self.ascending, units)
      longer = math.inf
      if rank < self.num_layers:
        longer = self.ascending[rank] / self.rates[k]
      bound = units, rank, longer
      self.bounds[k] = most, *bound
    return bound

  def _fits(self, k, start, stop):
    fits = self.fits is None or self.fits(k, start, stop)
    if not fits and stop - start == 1:
      self.seen[k][start] = math.inf
    return fits


def _sums(costs, speeds, fits):
  costs, speeds = _exact(costs), _exact(speeds)
  unit = Fraction(1, math.lcm(*(cost.denominator for cost in costs)))
  units = [int(cost / unit) for cost in costs]
  totals = [0, *itertools.accumulate(units)]
  rates = [speed / unit for speed in speeds]
  ascending = sorted(units)
  speed_totals = [0, *itertools.accumulate(speeds)]
  return _Sums(
    time=lambda k, start, stop: (totals[stop] - totals[start]) / rates[k],
    num_layers=len(costs),
    num_stages=len(speeds),
    totals=totals,
    rates=rates,
    fits=fits,
    ascending=ascending,
    ranks=np.array([bisect.bisect_left(ascending, cost) for cost in units]),
    weights=[len(costs) * total + l for l, total in enumerate(totals)],
    shares=[a / b for a, b in itertools.pairwise(speed_totals)],
  )


def _exact(values):
  """Returns fractions equal to the values; floats have powers of two below."""
  return [
    Fraction(
      int(value) if isinstance(value, numbers.Integral) else float(value)
    )
    for value in values
  ]
