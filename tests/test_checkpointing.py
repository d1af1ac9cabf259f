"""Remat plans: optimal, valid, and Revolve's for equal layers."""

import functools
import heapq
import itertools
import math
import random

import pytest

from lingvo_gpipe import checkpointing
from lingvo_gpipe.checkpointing import (
  Backward,
  Chain,
  Forward,
  Remat,
  merging,
)


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


def _subsets(values):
  values = tuple(values)
  for size in range(len(values) + 1):
    yield from itertools.combinations(values, size)


def _can_run(run, inputs, recorded):
  """Whether every layer to be computed again has its input, held or made."""
  return all(l in recorded or l in inputs or l - 1 not in recorded for l in run)


def _least_of_all_steps(chain, in_flight, budget):
  """Least time in which any steps whatever go back; does its own counting.

  A shortest path over what is held: (next to go back over, inputs, recorded).
  """
  num_layers = len(chain.forward)

  def size(inputs, recorded):
    return sum(chain.boundary[l] for l in inputs) + sum(
      chain.internal[l] for l in recorded
    )

  def before(layers, start):
    return frozenset(l for l in layers if l < start)

  def moves(stop, inputs, recorded):
    """Yields (time, bytes while it runs, what is held then)."""
    for start in inputs:
      run = range(start, stop)
      if not _can_run(run, inputs, recorded):
        continue
      time = sum(chain.forward[l] for l in run if l not in recorded)
      left = before(inputs, start), before(recorded, start)
      work = size(run, run) + max(chain.workspace[l] for l in run)
      yield time, size(*left) + work, (start, *left)
      for end in range(start + 1, stop + 1):
        time = sum(chain.forward[start:end])
        for kept in _subsets(range(start + 1, min(end + 1, stop))):
          for again in _subsets(range(start, end)):
            held = inputs.union(kept, again), recorded.union(again)
            if held != (inputs, recorded):
              yield time, size(*held), (stop, *held)

  order = itertools.count()
  queue, done = [], set()
  for kept in _subsets(range(1, num_layers)):
    for recorded in _subsets(range(num_layers)):
      held = frozenset({0, *kept, *recorded}), frozenset(recorded)
      others = (in_flight - 1) * size(*held)
      if others + size(*held) <= budget:
        state = others, (num_layers, *held)
        heapq.heappush(queue, (0, next(order), state))
  while queue:
    time, _, (others, state) = heapq.heappop(queue)
    if state[0] == 0:
      return time
    if (others, state) in done:
      continue
    done.add((others, state))
    for more, work, after in moves(*state):
      if others + work <= budget:
        heapq.heappush(queue, (time + more, next(order), (others, after)))
  return math.inf


def _time(chain, remat):
  if remat is None:
    return math.inf
  counts = checkpointing.recomputed(remat, len(chain.forward))
  return sum(f * n for f, n in zip(chain.forward, counts, strict=True))


def _random_chain(rng, num_layers):
  def numbers(low, high):
    return tuple(rng.randint(low, high) for _ in range(num_layers))

  return Chain(numbers(1, 9), numbers(0, 4), numbers(0, 6), numbers(0, 3))


def _real_chain(rng, num_layers):
  """A chain whose sizes have no common divisor but 1."""
  layers = range(num_layers)
  return Chain(
    tuple(rng.random() for _ in layers),
    tuple(rng.randint(1 << 20, 1 << 22) for _ in layers),
    tuple(rng.randint(1 << 22, 1 << 26) for _ in layers),
    tuple(rng.randint(1 << 20, 1 << 24) for _ in layers),
  )


def _equal_chain(num_layers, boundary, internal, workspace):
  return Chain(
    (1,) * num_layers,
    (boundary,) * num_layers,
    (internal,) * num_layers,
    (workspace,) * num_layers,
  )


def _keep_all_bytes(chain, in_flight):
  everything = checkpointing.keep_all(len(chain.forward))
  return checkpointing.peak_bytes(chain, everything, in_flight)


def _check(remat, num_layers):
  """Plays a plan: whatever a step needs is there, layers go back in order."""
  assert all(0 < l < num_layers for l in remat.checkpoints)
  recorded = {*remat.recorded}
  inputs = {0, *remat.checkpoints, *recorded}
  next_back = num_layers
  for step in remat.backward:
    assert step.start in inputs
    assert step.start < step.stop <= next_back
    if isinstance(step, Forward):
      assert all(step.start < l <= step.stop for l in step.checkpoints)
      assert all(step.start <= l < step.stop for l in step.recorded)
      inputs |= {*step.checkpoints, *step.recorded}
      recorded |= {*step.recorded}
    else:
      assert step.stop == next_back
      assert _can_run(range(step.start, step.stop), inputs, recorded)
      next_back = step.start
      inputs = {l for l in inputs if l < step.start}
  assert next_back == 0


@pytest.mark.parametrize('num_layers', [1, 2, 3, 4, 5])
def test_equals_brute_force(num_layers):
  rng = random.Random(num_layers)
  plans = _plans(num_layers)
  infeasible = 0
  num_chains = 800 if num_layers < 5 else 200
  for _ in range(num_chains):
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
  assert 0 < infeasible < 0.75 * num_chains


@pytest.mark.parametrize('num_layers, num_chains', [(1, 50), (2, 200), (3, 80)])
def test_no_steps_of_any_kind_are_better(num_layers, num_chains):
  rng = random.Random(num_layers)
  for _ in range(num_chains):
    chain = _random_chain(rng, num_layers)
    in_flight = rng.randint(1, 4)
    budget = rng.randint(1, 50)
    found = checkpointing.cheapest(chain, in_flight, budget)
    least = _least_of_all_steps(chain, in_flight, budget)
    assert _time(chain, found) == least


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
  chain = _equal_chain(l, 1, 100, 0)
  # The layer at hand has an input, which need not be among those kept.
  assert checkpointing.peak_bytes(chain, remat, 1) <= s + 1 + 100


@pytest.mark.parametrize('l, s', [(1, 1), (2, 5), (5, 5), (600, 600), (9, 1)])
def test_revolve_at_its_ends(l, s):
  remat = checkpointing.revolve(l, s)
  _check(remat, l)
  counts = checkpointing.recomputed(remat, l)
  if s >= l:
    assert counts == (1,) * (l - 1) + (0,)
  else:
    assert sum(counts) == l * (l - 1) // 2


def test_revolve_needs_a_checkpoint():
  with pytest.raises(ValueError, match='0 checkpoints'):
    checkpointing.revolve(4, 0)


@pytest.mark.parametrize('l', [8, 16, 32, 64])
@pytest.mark.parametrize('s', range(2, 11))
def test_the_optimum_for_equal_layers_is_revolves(l, s):
  internal = 20
  chain = _equal_chain(l, 1, internal, 0)
  found = checkpointing.cheapest(chain, 1, s + 1 + internal)
  assert _time(chain, found) == _revolves_forwards(l, s)


def test_more_memory_never_costs_more_time():
  rng = random.Random(5)
  for _ in range(20):
    chain = _random_chain(rng, 8)
    times = [
      _time(chain, checkpointing.cheapest(chain, 2, budget))
      for budget in range(5, 120, 5)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


@pytest.mark.parametrize('in_flight', [1, 4])
def test_real_sizes_stay_within_their_budget(in_flight):
  chain = _real_chain(random.Random(6), 40)
  whole = _keep_all_bytes(chain, in_flight)
  for share in (0.1, 0.3, 0.9):
    found = checkpointing.cheapest(chain, in_flight, int(share * whole))
    _check(found, 40)
    assert checkpointing.peak_bytes(chain, found, in_flight) <= share * whole
    assert 0 < _time(chain, found) < 3 * sum(chain.forward)


@pytest.mark.parametrize('in_flight', [1, 4])
@pytest.mark.parametrize('share', [0.1, 0.3, 0.6, 0.9])
def test_rounding_of_sizes_costs_little(in_flight, share):
  # The same layers in sizes that are counted exactly, and in such that are not.
  small = _equal_chain(100, 1, 8, 1)
  large = _equal_chain(100, (1 << 20) + 1, (8 << 20) + 13, 1 << 20)
  budget = int(share * _keep_all_bytes(large, in_flight))
  found = checkpointing.cheapest(large, in_flight, budget)
  assert checkpointing.peak_bytes(large, found, in_flight) <= budget
  less = int(0.95 * share * _keep_all_bytes(small, in_flight))
  assert _time(large, found) <= _time(
    small, checkpointing.cheapest(small, in_flight, less)
  )


def test_a_budget_for_all_or_for_inputs_to_the_byte():
  chain = _real_chain(random.Random(7), 12)
  for in_flight in (1, 3):
    whole = _keep_all_bytes(chain, in_flight)
    found = checkpointing.cheapest(chain, in_flight, whole)
    assert found == checkpointing.keep_all(12)
    inputs = checkpointing.keep_inputs(12)
    budget = checkpointing.peak_bytes(chain, inputs, in_flight)
    found = checkpointing.cheapest(chain, in_flight, budget)
    assert _time(chain, found) <= sum(chain.forward)
  assert checkpointing.cheapest(chain, 1, 0) is None


def test_steps_are_joined_where_that_is_free():
  rng = random.Random(8)
  plans = _plans(5)
  for remat in rng.sample(plans, 200):
    chain = _random_chain(rng, 5)
    fewer = merging.merged(chain, remat, 2)
    _check(fewer, 5)
    counts = checkpointing.recomputed(remat, 5)
    assert checkpointing.recomputed(fewer, 5) == counts
    peak = checkpointing.peak_bytes(chain, remat, 2)
    assert checkpointing.peak_bytes(chain, fewer, 2) <= peak
    assert len(fewer.backward) <= len(remat.backward)


def test_what_is_recorded_and_used_at_once_is_one_step():
  chain = _equal_chain(4, 1, 5, 0)
  steps = (
    Backward(3, 4),
    Forward(0, 1, (1,), ()),
    Forward(1, 2, (2,), (1,)),
    Backward(2, 3),
    Backward(1, 2),
    Backward(0, 1),
  )
  fewer = merging.merged(chain, Remat((3,), (3,), steps), 1)
  assert fewer.backward == (
    Backward(3, 4),
    Forward(0, 1, (1,), ()),
    Backward(1, 3),
    Backward(0, 1),
  )


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
