"""Remat plans: optimal, valid, and Revolve's for equal layers."""

import functools
import math
import random

import pytest

from lingvo_gpipe import checkpointing
from lingvo_gpipe.checkpointing import Backward, Chain, Forward, Remat


def _strategies(s, t):
  """All ways back over layers s to t - 1 whose input is held, as steps."""
  if t - s == 1:
    return [(Backward(s, t),)]
  found = [
    (Forward(s, s + 1, (s + 1,), (s,)), *rest, Backward(s, s + 1))
    for rest in _strategies_cached(s + 1, t)
  ]
  for middle in range(s + 1, t):
    for right in _strategies_cached(middle, t):
      for left in _strategies_cached(s, middle):
        found.append((Forward(s, middle, (middle,), ()), *right, *left))
  return found


_strategies_cached = functools.cache(_strategies)


@functools.cache
def _plans(num_layers):
  """All plans of a chain: what F records, and how the rest is gone back."""

  def ways(s):
    if s == num_layers:
      return [((), (), ())]
    found = []
    for checkpoints, recorded, steps in ways(s + 1):
      found.append(
        ((s, *checkpoints), (s, *recorded), (*steps, Backward(s, s + 1)))
      )
    for stop in range(s + 1, num_layers + 1):
      for checkpoints, recorded, steps in ways(stop):
        for mine in _strategies_cached(s, stop):
          found.append(((s, *checkpoints), recorded, (*steps, *mine)))
    return found

  return [Remat(c[1:], r, b) for c, r, b in ways(0)]


def _time(chain, remat):
  counts = checkpointing.recomputed(remat, len(chain.forward))
  return sum(f * n for f, n in zip(chain.forward, counts, strict=True))


def _random_chain(rng, num_layers):
  def numbers(low, high):
    return tuple(rng.randint(low, high) for _ in range(num_layers))

  return Chain(numbers(1, 9), numbers(0, 4), numbers(0, 6), numbers(0, 3))


def _check(remat, num_layers):
  """Plays a plan: whatever a step needs is there, layers go back in order."""
  inputs = {0, *remat.checkpoints, *remat.recorded}
  next_back = num_layers
  for step in remat.backward:
    assert step.start in inputs
    if isinstance(step, Forward):
      assert all(step.start < l <= step.stop for l in step.checkpoints)
      assert all(step.start <= l < step.stop for l in step.recorded)
      inputs |= {*step.checkpoints, *step.recorded}
    else:
      assert step.stop == next_back
      next_back = step.start
      inputs = {l for l in inputs if l < step.start}
  assert next_back == 0


@pytest.mark.parametrize('num_layers', [1, 2, 3, 4])
def test_equals_brute_force(num_layers):
  rng = random.Random(num_layers)
  plans = _plans(num_layers)
  infeasible = 0
  for _ in range(400):
    chain = _random_chain(rng, num_layers)
    in_flight = rng.randint(1, 4)
    budget = rng.randint(1, 60)
    fitting = [
      _time(chain, p)
      for p in plans
      if checkpointing.peak_bytes(chain, p, in_flight) <= budget
    ]
    found = checkpointing.cheapest(chain, in_flight, budget)
    if not fitting:
      assert found is None
      infeasible += 1
      continue
    _check(found, num_layers)
    assert checkpointing.peak_bytes(chain, found, in_flight) <= budget
    assert _time(chain, found) == min(fitting)
  assert infeasible < 300


def _revolves_forwards(l, s):
  """r * l - C(s + r, s + 1), r the least with C(s + r, s) >= l."""
  r = 0
  while math.comb(s + r, s) < l:
    r += 1
  return r * l - math.comb(s + r, s + 1)


@pytest.mark.parametrize('l', [8, 16, 32, 64])
@pytest.mark.parametrize('s', range(2, 11))
def test_revolve_has_the_binomial_number_of_forwards(l, s):
  remat = checkpointing.revolve(l, s)
  _check(remat, l)
  assert sum(checkpointing.recomputed(remat, l)) == _revolves_forwards(l, s)
  chain = Chain((1,) * l, (1,) * l, (100,) * l, (0,) * l)
  # The layer at hand has an input, which need not be among those kept.
  assert checkpointing.peak_bytes(chain, remat, 1) <= s + 1 + 100


@pytest.mark.parametrize('l', [8, 16, 32, 64])
@pytest.mark.parametrize('s', range(2, 11))
def test_the_optimum_for_equal_layers_is_revolves(l, s):
  internal = 20
  chain = Chain((1,) * l, (1,) * l, (internal,) * l, (0,) * l)
  found = checkpointing.cheapest(chain, 1, s + 1 + internal)
  assert _time(chain, found) == _revolves_forwards(l, s)


def test_more_memory_never_costs_more_time():
  rng = random.Random(5)
  for _ in range(20):
    chain = _random_chain(rng, 8)
    times = []
    for budget in range(5, 120, 5):
      found = checkpointing.cheapest(chain, 2, budget)
      times.append(math.inf if found is None else _time(chain, found))
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


def test_real_sizes_stay_within_their_budget():
  rng = random.Random(6)
  layers = range(40)
  chain = Chain(
    tuple(rng.random() for _ in layers),
    tuple(rng.randint(1 << 20, 1 << 22) for _ in layers),
    tuple(rng.randint(1 << 22, 1 << 26) for _ in layers),
    tuple(rng.randint(1 << 20, 1 << 24) for _ in layers),
  )
  everything = checkpointing.keep_all(40)
  whole = checkpointing.peak_bytes(chain, everything, 4)
  for share in (0.1, 0.3, 0.9):
    found = checkpointing.cheapest(chain, 4, int(share * whole))
    _check(found, 40)
    assert checkpointing.peak_bytes(chain, found, 4) <= share * whole
    assert 0 < _time(chain, found) < 3 * sum(chain.forward)


def test_keeping_all_and_keeping_inputs():
  chain = Chain((1, 2), (3, 4), (10, 20), (5, 6))
  everything = checkpointing.keep_all(2)
  assert checkpointing.recomputed(everything, 2) == (0, 0)
  assert checkpointing.kept_bytes(chain, everything) == 3 + 4 + 10 + 20
  assert checkpointing.peak_bytes(chain, everything, 3) == 3 * 37 + 6
  inputs = checkpointing.keep_inputs(2)
  assert checkpointing.recomputed(inputs, 2) == (1, 1)
  assert checkpointing.kept_bytes(chain, inputs) == 3
  assert checkpointing.peak_bytes(chain, inputs, 3) == 2 * 3 + 37 + 6
