"""Cuts are optimal, contiguous, never empty, and fit."""

import collections
import functools
import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from lingvo.core import base_layer, gpipe, py_utils, tshape

from lingvo_gpipe import partition


def _slowest(stage_cost, stages):
  return max(stage_cost(k, s.start, s.stop) for k, s in enumerate(stages))


def _best(stage_cost, num_layers, num_stages):
  """The optimum by trying every cut."""
  stage_cost = functools.cache(stage_cost)
  return min(
    max(
      stage_cost(k, start, stop)
      for k, (start, stop) in enumerate(itertools.pairwise(ends))
    )
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1)
    for ends in [[0, *cuts, num_layers]]
  )


def _check(cut, stage_cost, num_layers, num_stages):
  """Checks a cut against brute force; returns whether there is one that fits.

  Args:
    cut: makes the stages.
    stage_cost: takes k, start and stop; without rounding.
    num_layers: how many layers there are.
    num_stages: how many stages are wanted.
  """
  best = _best(stage_cost, num_layers, num_stages)
  if best == math.inf:
    with pytest.raises(partition.DoesNotFit):
      cut()
    return False
  stages = cut()
  assert len(stages) == num_stages
  assert all(stages)
  assert [l for stage in stages for l in stage] == list(range(num_layers))
  assert _slowest(stage_cost, stages) == best
  return True


def _random_size(rng, most=12):
  num_layers = rng.randint(1, most)
  return num_layers, rng.randint(1, num_layers)


def _random_costs(rng, num_layers):
  draw = rng.choice(
    [
      lambda: rng.randint(0, 5),
      lambda: rng.choice([0, 1, 2, 3, 50]),
      lambda: rng.choice([0, 1e-9, 1.0, 1e9]),
      rng.random,
      lambda: rng.choice([0.1, 0.2, 0.3]),
    ]
  )
  return [draw() for _ in range(num_layers)]


def _random_speeds(rng, num_stages):
  draw = rng.choice(
    [lambda: 1, lambda: rng.choice([1, 3, 100]), lambda: 0.01 + rng.random()]
  )
  return [draw() for _ in range(num_stages)]


def _random_memory(rng, num_layers, num_stages):
  """Returns a `fits`: in flight are K - k micro-batches, caps may differ."""
  sizes = [rng.choice([0, 1, 1, 2, 5]) for _ in range(num_layers)]
  room = rng.choice([2, 6, 12, 30])
  caps = [rng.randint(0, room) for _ in range(num_stages)]
  return lambda k, start, stop: (
    (num_stages - k) * sum(sizes[start:stop]) <= caps[k] * num_stages
  )


def _exact_cost(costs, speeds, fits=lambda k, start, stop: True):
  """Returns the stage cost that `cut` minimises, without rounding."""
  costs = [Fraction(cost) for cost in costs]
  speeds = [Fraction(speed) for speed in speeds]
  return lambda k, start, stop: (
    sum(costs[start:stop]) / speeds[k] if fits(k, start, stop) else math.inf
  )


def test_equals_brute_force():
  rng = random.Random(0)
  for _ in range(1500):
    num_layers, num_stages = _random_size(rng)
    costs = _random_costs(rng, num_layers)
    _check(
      functools.partial(partition.cut, costs, num_stages),
      _exact_cost(costs, [1] * num_stages),
      num_layers,
      num_stages,
    )


def test_equals_brute_force_with_speeds():
  rng = random.Random(1)
  for _ in range(1500):
    num_layers, num_stages = _random_size(rng)
    costs = _random_costs(rng, num_layers)
    speeds = _random_speeds(rng, num_stages)
    _check(
      functools.partial(partition.cut, costs, num_stages, speeds=speeds),
      _exact_cost(costs, speeds),
      num_layers,
      num_stages,
    )


def test_equals_brute_force_with_speeds_and_memory():
  rng = random.Random(2)
  fitted = 0
  for _ in range(3000):
    num_layers, num_stages = _random_size(rng)
    costs = _random_costs(rng, num_layers)
    speeds = _random_speeds(rng, num_stages)
    fits = _random_memory(rng, num_layers, num_stages)
    fitted += _check(
      functools.partial(
        partition.cut, costs, num_stages, speeds=speeds, fits=fits
      ),
      _exact_cost(costs, speeds, fits),
      num_layers,
      num_stages,
    )
  assert 1000 < fitted < 2000


def test_cut_by_equals_brute_force_with_any_cost_that_grows():
  rng = random.Random(3)
  fitted = 0
  for _ in range(1000):
    num_layers, num_stages = _random_size(rng, most=10)
    draw = rng.choice([rng.random, lambda: rng.choice([0, 0, 0, 1, 2, 9])])
    never = rng.choice([0, 0, 0.03])
    table = {}
    for k in range(num_stages):
      for stop in range(num_layers + 1):
        table[k, stop, stop] = 0
      for length in range(1, num_layers + 1):
        for start in range(num_layers - length + 1):
          stop = start + length
          table[k, start, stop] = (
            math.inf
            if rng.random() < never
            else draw()
            + max(table[k, start + 1, stop], table[k, start, stop - 1])
          )

    def stage_cost(k, start, stop, table=table):
      return table[k, start, stop]

    fitted += _check(
      functools.partial(partition.cut_by, stage_cost, num_layers, num_stages),
      stage_cost,
      num_layers,
      num_stages,
    )
  assert 500 < fitted < 1000


def test_a_layer_waits_for_the_device_that_it_fits():
  def fits(k, start, stop):
    return k == 2 or not start <= 3 < stop

  assert 3 in partition.cut([0, 0, 0, 9, 0], 3, fits=fits)[2]
  with pytest.raises(partition.DoesNotFit, match='5 layers into 2 stages'):
    partition.cut([0, 0, 0, 9, 0], 2, fits=fits)


def test_a_costly_layer_waits_for_the_fast_device():
  stages = partition.cut([1, 1, 4, 1, 1], 3, speeds=[1, 2, 1])
  assert stages == (range(0, 2), range(2, 3), range(3, 5))


def test_sums_are_not_rounded():
  costs = [2.0**53, 1, 1, 2.0**53, 1, 1e-300]
  stages = partition.cut(costs, 2)
  assert [len(stage) for stage in stages] == [3, 3]
  assert partition.cut([1e300, 1e300, 1e308, 1e308], 2)[1] == range(3, 4)


def test_cut_by_takes_integers_that_floats_cannot_tell_apart():
  stages = partition.cut_by(
    lambda k, start, stop: 2**60 + 4**k * (stop - start), 9, 3
  )
  assert max(4**k * len(stage) for k, stage in enumerate(stages)) == 16
  assert _slowest(lambda k, start, stop: stop - start, stages) < 7


def test_takes_arrays():
  costs = np.array([2**62, 2**62, 2**62, 2**62])
  assert partition.cut(costs, 2) == (range(0, 2), range(2, 4))
  costs = np.array([3, 1, 1, 1], np.float32)
  speeds = np.array([1, 1], np.float32)
  assert partition.cut(costs, 2, speeds=speeds) == (range(0, 1), range(1, 4))


@pytest.mark.parametrize('cost', [0, 1, 0.1])
def test_equal_layers_differ_by_one_at_most(cost):
  for num_layers in range(1, 43):
    for num_stages in range(1, num_layers + 1):
      for stages in (
        partition.cut([cost] * num_layers, num_stages),
        partition.cut_by(
          lambda k, start, stop: cost * (stop - start), num_layers, num_stages
        ),
      ):
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1


def test_bottleneck_and_imbalance():
  stages = (range(0, 1), range(1, 4))
  assert partition.bottleneck([3, 1, 1, 4], stages) == 6
  assert partition.bottleneck([3, 1, 1, 4], stages, [1, 4]) == 3
  assert partition.imbalance([3, 1, 1, 4], stages) == pytest.approx(6 / 4.5)
  assert partition.imbalance([3, 1, 1, 4], stages, [1, 2]) == 1
  assert partition.imbalance([0, 0, 0, 0], stages) == 1


@pytest.mark.parametrize('num_stages', [0, 3])
def test_no_stage_for_a_layer_or_no_layer_for_a_stage(num_stages):
  message = f'cannot cut 2 layers into {num_stages} stages'
  with pytest.raises(ValueError, match=message):
    partition.cut([1, 1], num_stages)
  with pytest.raises(ValueError, match=message):
    partition.cut_by(lambda k, start, stop: 1, 2, num_stages)


@pytest.mark.parametrize('value', [-1, math.nan, math.inf])
def test_impossible_numbers_are_named(value):
  with pytest.raises(ValueError, match=f'cost of layer 1 is {value}'):
    partition.cut([1, value, 1], 2)
  with pytest.raises(ValueError, match=f'speed of stage 1 is {value}'):
    partition.cut([1, 1, 1], 2, speeds=[1, value])


def test_speeds_are_positive_and_one_a_stage():
  with pytest.raises(ValueError, match='speed of stage 0 is 0'):
    partition.cut([1, 1, 1], 2, speeds=[0, 1])
  with pytest.raises(ValueError, match='3 speeds for 2 stages'):
    partition.cut([1, 1, 1], 2, speeds=[1, 1, 1])


@pytest.mark.parametrize('in_flight', [False, True])
def test_many_layers_take_few_looks_at_memory(in_flight):
  num_layers, num_stages = 10_000, 512
  rng = random.Random(4)
  costs = [rng.random() for _ in range(num_layers)]
  sizes = [rng.random() for _ in range(num_layers)]
  totals = [0, *itertools.accumulate(sizes)]
  # Either every stage has room for a tenth more than its part, or there is
  # room for a stage ever longer, and next to none at first.
  caps = [
    (90 / (num_stages - k) if in_flight else 1.1) * totals[-1] / num_stages
    for k in range(num_stages)
  ]
  looks = collections.Counter()

  def fits(k, start, stop):
    looks[k, start, stop] += 1
    return totals[stop] - totals[start] <= caps[k]

  stages = partition.cut(costs, num_stages, fits=fits)
  assert looks.total() < 50_000
  assert max(looks.values()) == 1
  assert len(stages) == num_stages
  assert stages[0].start == 0 and stages[-1].stop == num_layers
  assert all(a.stop == b.start for a, b in itertools.pairwise(stages))
  assert all(fits(k, s.start, s.stop) and s for k, s in enumerate(stages))


class _Costly(base_layer.BaseLayer):
  """A layer of which nothing is known but its cost."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('flops', 1, 'What FPropMeta tells.')
    return p

  @classmethod
  def FPropMeta(cls, p, *inputs):
    return py_utils.NestedMap(flops=p.flops, out_shapes=inputs)


def _cut_by_lingvo(costs, num_stages):
  stages = gpipe.PartitionSequentialLayers(
    [_Costly.Params().Set(flops=cost) for cost in costs],
    num_stages,
    tshape.Shape([1]),
  )
  ends = itertools.accumulate((len(stage.sub) for stage in stages), initial=0)
  return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def test_lingvo_never_cuts_better():
  rng = random.Random(5)
  better = 0
  for _ in range(100):
    num_layers, num_stages = _random_size(rng, most=40)
    costs = [rng.choice([1, 2, 3, 40]) for _ in range(num_layers)]
    ours = partition.bottleneck(costs, partition.cut(costs, num_stages))
    lingvos = partition.bottleneck(costs, _cut_by_lingvo(costs, num_stages))
    assert ours <= lingvos
    better += ours < lingvos
  assert better > 50


@pytest.mark.parametrize(
  'num_layers, num_stages, most, lingvos',
  [(24, 8, 3, 4), (16, 4, 4, 5), (42, 16, 3, 3)],
)
def test_equal_layers_by_us_and_by_lingvo(
  num_layers, num_stages, most, lingvos
):
  costs = [1] * num_layers
  stages = partition.cut(costs, num_stages)
  assert partition.bottleneck(costs, stages) == most
  assert partition.bottleneck(costs, _cut_by_lingvo(costs, num_stages)) == (
    lingvos
  )
