"""Cuts a list of costs into contiguous stages whose slowest is fastest.

costs    3 1 1 1 2 2 2          K = 3, bottleneck 4: the optimum
stages  [3 1][1 1 2][2 2]
"""

import bisect
import itertools
from collections.abc import Sequence


def cut(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
  """Returns for each stage the range of its layers; no stage is empty.

  Minimises the largest sum of costs over all contiguous cuts. That optimum is
  the cost of some contiguous run, at least that of the costliest layer; it is
  found by bisection, with a greedy fill as the test.

  Args:
    costs: of each layer, none negative.
    num_stages: how many stages to cut.

  Raises:
    ValueError: there are fewer layers than stages, or fewer than one stage.
  """
  if not 1 <= num_stages <= len(costs):
    raise ValueError(f'cannot cut {len(costs)} layers into {num_stages} stages')
  totals = [0, *itertools.accumulate(costs)]
  costliest = max(b - a for a, b in itertools.pairwise(totals))
  candidates = sorted(
    {b - a for a, b in itertools.combinations(totals, 2) if b - a >= costliest}
  )
  best = bisect.bisect_left(
    candidates, True, key=lambda most: len(_fill(totals, most)) <= num_stages
  )
  stages = _fill(totals, candidates[best])
  while len(stages) < num_stages:
    _split_costliest(stages, totals)
  return tuple(stages)


def _fill(totals: Sequence[float], most: float) -> list[range]:
  """Fills each stage up to the cost `most` before it opens the next."""
  stages, start = [], 0
  for layer in range(1, len(totals) - 1):
    if totals[layer + 1] - totals[start] > most:
      stages.append(range(start, layer))
      start = layer
  return [*stages, range(start, len(totals) - 1)]


def _split_costliest(stages: list[range], totals: Sequence[float]) -> None:
  """Cuts the costliest stage of several layers where its halves are closest."""

  def cost(start, stop):
    return totals[stop] - totals[start]

  divisible = [k for k, stage in enumerate(stages) if len(stage) > 1]
  k = max(divisible, key=lambda k: cost(stages[k].start, stages[k].stop))
  start, stop = stages[k].start, stages[k].stop
  middle = min(
    range(start + 1, stop), key=lambda m: max(cost(start, m), cost(m, stop))
  )
  stages[k : k + 1] = [range(start, middle), range(middle, stop)]
