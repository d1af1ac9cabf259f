"""The simulator: starts, ends, and whom to blame for the bubble."""

import random

import pytest
import schedule_cases

from lingvo_gpipe import schedule
from lingvo_gpipe.schedule import action, grid, memory, simulation

_TWO_STAGES = schedule.make('1f1b', 2, 2)


def _random_times(numbers, num_stages):
  seconds = tuple(
    {kind: numbers.uniform(0.1, 2) for kind in 'FBIW'}
    for _ in range(num_stages)
  )
  transfer = tuple(numbers.uniform(0, 1) for _ in range(num_stages - 1))
  return simulation.Times(seconds, transfer)


def test_each_action_starts_when_it_can_and_not_before():
  numbers = random.Random(0)
  for name, K, M, V in schedule_cases.random_cases(300):
    built = schedule.make(name, K, M, V)
    times = _random_times(numbers, K)
    timeline = schedule.simulate(built, times)
    device_of = schedule.placement(built)
    ends = {e: s.end for s in timeline for e in action.effects(s.action)}
    by_action = {s.action: s for s in timeline}
    for d, actions in enumerate(built):
      free = 0.0
      for a in actions:
        span = by_action[a]
        arrivals = [0.0]
        for effect in action.needs(a, K):
          j, k = sorted((effect.stage, a.stage))
          apart = device_of[j] != device_of[k]
          arrivals.append(ends[effect] + (times.transfer[j] if apart else 0))
        assert span.device == d
        assert span.arrived == pytest.approx(max(arrivals))
        assert span.start == max(span.arrived, free)
        assert span.end == span.start + times.of(a)
        free = span.end


def test_causes_add_up_to_the_bubble():
  numbers = random.Random(1)
  for name, K, M, V in schedule_cases.random_cases(300):
    built = schedule.make(name, K, M, V)
    times = _random_times(numbers, K)
    causes = schedule.bubble_by_cause(built, times)
    bubble = schedule.bubble(schedule.simulate(built, times))
    assert sum(causes.values()) == pytest.approx(bubble)
    assert min(causes.values()) > -1e-9


def test_causes():
  times = simulation.equal_times(2)
  causes = schedule.bubble_by_cause(_TWO_STAGES, times)
  # Two devices for nine units: stage 1 idles one before its first forward and
  # two after its last backward, stage 0 three in between.
  assert causes == pytest.approx(
    {
      'fill': 1 / 18,
      'drain': 2 / 18,
      'waiting': 3 / 18,
      'imbalance': 0,
      'transfer': 0,
    }
  )
  slow = dict(times.seconds[0], F=3.0)
  unequal = simulation.Times((slow, times.seconds[1]), times.transfer)
  causes = schedule.bubble_by_cause(_TWO_STAGES, unequal)
  # Stage 0 has 10 units to do, stage 1 has 6, the step takes 11.
  assert causes['imbalance'] == pytest.approx(2 / 11)
  far = simulation.equal_times(2, transfer=1.0)
  causes = schedule.bubble_by_cause(_TWO_STAGES, far)
  assert causes['transfer'] == pytest.approx(2 / 11)
  assert causes['imbalance'] == 0


def test_held_bytes():
  assert memory.held(_TWO_STAGES, [10, 1]) == [[10, 20, 20, 10], [1, 1, 1, 1]]


def test_grid():
  timeline = schedule.simulate(_TWO_STAGES, simulation.equal_times(2))
  assert grid.to_text(timeline).splitlines() == [
    'device 0  0F0 0F1  .   .  0B0 ---  .  0B1 ---',
    'device 1   .  1F0 1B0 --- 1F1 1B1 ---  .   .',
  ]
