"""The engine does what a remat plan says, and no bit changes."""

import functools

import helpers
import pytest
import small_models

from lingvo_gpipe import checkpointing
from lingvo_gpipe import plan as plan_lib

_STEPS = 2


@functools.cache
def _reference():
  return helpers.losses(
    small_models.Micro, _STEPS, num_stages=2, num_micro_batches=4, remat='none'
  )


def _peak(remat):
  task = helpers.make_task(
    small_models.Micro, num_stages=2, num_micro_batches=4, remat=remat
  )
  return max(plan_lib.predict(task.Plan(), plan_lib.Machine()).device_bytes)


@functools.cache
def _halfway():
  """A budget halfway between keeping all and keeping inputs alone."""
  return int((_peak('none') + _peak('full')) / 2)


@pytest.mark.parametrize('schedule', ['1f1b', 'zb1p'])
@pytest.mark.parametrize('remat', ['revolve:1', 'revolve:2', 'budget'])
def test_remat_plans_do_not_change_a_bit(schedule, remat):
  found = helpers.losses(
    small_models.Micro,
    _STEPS,
    num_stages=2,
    num_micro_batches=4,
    schedule=schedule,
    remat=remat,
    device_memory=f'{_halfway()}B' if remat == 'budget' else None,
  )
  assert found == _reference()


def test_a_budget_between_all_and_nothing_keeps_some_layers():
  task = helpers.make_task(
    small_models.Micro,
    num_stages=2,
    num_micro_batches=4,
    remat='budget',
    device_memory=f'{_halfway()}B',
  )
  plan = task.Plan()
  forecast = plan_lib.predict(plan, plan_lib.Machine())
  assert max(forecast.device_bytes) <= _halfway()
  first = plan.stages[0]
  again = checkpointing.recomputed(first.remat, len(first.layers))
  assert 0 < sum(again) < len(first.layers)


@pytest.mark.parametrize('remat', ['full', 'revolve:1', 'revolve:2'])
def test_every_forward_of_a_plan_is_run_and_no_other(remat):
  task = helpers.make_task(
    small_models.Micro, num_stages=1, num_micro_batches=1, remat=remat
  )
  names = task.Plan().names
  blocks = [l for l, name in enumerate(names) if name.startswith('block')]
  planned = task.Plan().stages[0].remat
  counts = checkpointing.recomputed(planned, len(names))
  # A block's forward has 6 products. Its output, which the last one makes, is
  # not needed where the block is the last to be recomputed.
  ends = sum(
    step.stop - 1 in blocks and step.stop - 1 not in planned.recorded
    for step in planned.backward
    if isinstance(step, checkpointing.Backward)
  )
  expected = 6 * sum(counts[l] for l in blocks) - ends + counts[-1]
  nothing_again = helpers.make_task(
    small_models.Micro, num_stages=1, num_micro_batches=1, remat='none'
  )
  assert helpers.num_matrix_products(task) == (
    helpers.num_matrix_products(nothing_again) + expected
  )
