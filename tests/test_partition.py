"""Cuts are optimal, contiguous and never empty."""

import itertools
import random

import pytest

from lingvo_gpipe import partition


def _bottleneck(costs, stages):
  return max(sum(costs[l] for l in stage) for stage in stages)


def _best(costs, num_stages):
  """The optimum by trying every cut."""
  layers = range(len(costs))
  return min(
    _bottleneck(
      costs,
      [range(a, b) for a, b in itertools.pairwise([0, *cuts, len(costs)])],
    )
    for cuts in itertools.combinations(layers[1:], num_stages - 1)
  )


def test_equals_brute_force():
  rng = random.Random(0)
  for _ in range(2000):
    num_layers = rng.randint(1, 10)
    num_stages = rng.randint(1, num_layers)
    costs = [rng.choice([0, 1, 2, 3, 50]) for _ in range(num_layers)]
    stages = partition.cut(costs, num_stages)
    assert len(stages) == num_stages
    assert [l for stage in stages for l in stage] == list(range(num_layers))
    assert all(stages)
    assert _bottleneck(costs, stages) == _best(costs, num_stages)


def test_fractional_costs_do_not_lose_the_optimum_to_rounding():
  rng = random.Random(1)
  for _ in range(500):
    costs = [rng.random() for _ in range(9)]
    stages = partition.cut(costs, 4)
    assert _bottleneck(costs, stages) == pytest.approx(_best(costs, 4))


@pytest.mark.parametrize('num_layers, num_stages', [(16, 4), (42, 16), (24, 8)])
def test_equal_layers_differ_by_one_at_most(num_layers, num_stages):
  sizes = [len(s) for s in partition.cut([1] * num_layers, num_stages)]
  assert max(sizes) == -(-num_layers // num_stages)
  assert min(sizes) >= 1


def test_more_stages_than_layers():
  with pytest.raises(ValueError, match='2 layers into 3 stages'):
    partition.cut([1, 1], 3)
