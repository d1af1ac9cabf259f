"""The schedules that can be asked for by name, checked by number."""

import itertools

import pytest
import schedule_cases

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import memory, simulation

_D_M = list(itertools.product(range(1, 9), range(1, 33)))


def _idle(name, num_devices, num_micro_batches, virtual_stages=1):
  """Simulates equal layers; returns idle time a device and its causes.

  A device's F, I and W of one micro-batch take one unit each, all its stages
  together.
  """
  num_stages = num_devices * virtual_stages
  built = schedule.make(name, num_stages, num_micro_batches, virtual_stages)
  times = simulation.equal_times(num_stages, *[1 / virtual_stages] * 3)
  timeline = schedule.simulate(built, times)
  idle = schedule.bubble(timeline) * schedule.makespan(timeline)
  return idle, schedule.bubble_by_cause(built, times)


@pytest.mark.parametrize('name', ['gpipe', '1f1b'])
def test_bubble_of_fill_drain_and_1f1b(name):
  for K, M in _D_M:
    idle, _ = _idle(name, K, M)
    assert idle / (idle + 3 * M) == pytest.approx((K - 1) / (M + K - 1))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_device():
  for D, rounds, V in itertools.product(range(1, 9), range(1, 5), range(1, 5)):
    idle, _ = _idle('interleaved', D, rounds * D, V)
    assert idle == pytest.approx(3 * (D - 1) / V)


def test_zb1p_has_a_third_of_the_bubble():
  for K, M in _D_M:
    if M >= K:
      assert _idle('zb1p', K, M)[0] == pytest.approx(K - 1)


@pytest.mark.parametrize('name, virtual_stages', [('zb2p', 1), ('zbv', 2)])
def test_no_bubble_in_steady_state(name, virtual_stages):
  for D, M in _D_M:
    if M >= 2 * D - 1:
      idle, causes = _idle(name, D, M, virtual_stages)
      assert causes['waiting'] == pytest.approx(0)
      # The last device cannot start earlier.
      assert idle == pytest.approx((D - 1) / virtual_stages)


@pytest.mark.parametrize('K, M', _D_M)
def test_micro_batches_in_flight(K, M):
  def peaks(name, num_stages=K):
    return memory.peaks(schedule.make(name, num_stages, M))

  assert peaks('gpipe') == [M] * (K - 1) + [1]
  assert peaks('1f1b') == [min(K - k, M) for k in range(K)]
  assert max(peaks('zb1p')) == min(K, M)
  assert max(peaks('zb2p')) == min(2 * K - 1, M)
  # Two stages a device, each of half the size.
  assert max(peaks('zbv', 2 * K)) == min(2 * K, 2 * M)


def test_every_stage_sums_micro_batches_in_order():
  # Gradients can then be added as they come, the same way for all schedules.
  for case in schedule_cases.random_cases(500):
    for actions in schedule.make(*case):
      for kind, k in {(a.kind, a.stage) for a in actions}:
        order = [a.micro_batch for a in actions if a[:2] == (k, kind)]
        assert order == sorted(order)


def test_numbers_that_do_not_fit_are_answered_with_those_that_do():
  with pytest.raises(errors.UserError, match='set num_stages to 6 or 8'):
    schedule.make('interleaved', 7, 4)
  with pytest.raises(errors.UserError, match='set num_stages to 2'):
    schedule.make('zbv', 1, 4)
  with pytest.raises(errors.UserError, match='choose schedule=interleaved'):
    schedule.make('1f1b', 8, 4, 2)
  with pytest.raises(errors.UserError, match='num_micro_batches=0: at least 1'):
    schedule.make('1f1b', 8, 0)
  with pytest.raises(errors.UserError, match='choose one of gpipe, 1f1b'):
    schedule.make('2f2b', 8, 4)
