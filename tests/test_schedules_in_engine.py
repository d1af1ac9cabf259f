"""The engine runs any verified schedule, with the bits of `gpipe`."""

import functools

import helpers
import pytest
import small_models
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.engine import stopwatch as stopwatch_lib
from lingvo_gpipe.schedule import shares, timeline

_STEPS = 2
_SCHEDULES = [
  {'schedule': '1f1b'},
  {'schedule': 'zb1p'},
  {'schedule': 'zb2p'},
  {'schedule': 'interleaved'},
  {'schedule': 'interleaved', 'num_stages': 8, 'virtual_stages': 4},
  {'schedule': 'zbv'},
  {'schedule': 'zbv', 'num_stages': 8},
]
# Backward out of order, whole and split, gradients held until it is their turn.
_OWN = """
0F1 0F0 0F2 0F3 0B3 0I1 0I0 0W1 0W0 0B2
1F1 1F0 1B1 1I0 1F2 1F3 1B3 1B2 1W0
"""


@functools.cache
def _reference(remat):
  return helpers.losses(
    small_models.Micro,
    _STEPS,
    num_stages=4,
    num_micro_batches=4,
    schedule='gpipe',
    remat=remat,
  )


@pytest.mark.parametrize('fields', _SCHEDULES, ids=lambda f: f['schedule'])
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_schedules_do_not_change_a_bit(fields, remat):
  fields = {'num_stages': 4, 'num_micro_batches': 4, 'remat': remat, **fields}
  found = helpers.losses(small_models.Micro, _STEPS, **fields)
  assert found == _reference(remat)


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_a_schedule_of_ones_own_does_not_change_a_bit(tmp_path, remat):
  path = tmp_path / 'mine.txt'
  path.write_text(_OWN)
  found = helpers.losses(
    small_models.Micro,
    _STEPS,
    num_stages=2,
    num_micro_batches=4,
    schedule_file=str(path),
    remat=remat,
  )
  assert found == _reference(remat)


def test_updates_inside_a_schedule_are_refused(tmp_path):
  path = tmp_path / 'mine.txt'
  path.write_text('0F0 0B0 0U0@1\n')
  with pytest.raises(errors.UserError, match='0U0@1; the mpmd engine runs F'):
    helpers.losses(
      small_models.Micro,
      1,
      num_stages=1,
      num_micro_batches=1,
      schedule_file=str(path),
    )


def _num_matrix_products(schedule, remat):
  task = helpers.make_task(
    small_models.Micro,
    num_stages=4,
    num_micro_batches=4,
    schedule=schedule,
    remat=remat,
  )
  return helpers.num_matrix_products(task)


@pytest.mark.parametrize('remat', ['none', 'full', 'except_last'])
def test_halves_of_a_backward_repeat_no_work(remat):
  assert _num_matrix_products('zb1p', remat) == _num_matrix_products(
    '1f1b', remat
  )


def test_a_stopwatch_changes_no_bit_and_sees_every_action():
  task = helpers.make_task(
    small_models.Micro,
    num_stages=4,
    num_micro_batches=4,
    schedule='zb1p',
    remat='full',
  )
  batch = next(iter(task.input.datasource.GetDataset()))
  watch = stopwatch_lib.Stopwatch()

  @tf.function(autograph=False)
  def both():
    plain = helpers.forward_backward(task, batch)
    timed = helpers.forward_backward(task, batch, watch)
    return plain, timed, watch.times()

  both()
  plain, timed, times = both()
  for a, b in zip(tf.nest.flatten(plain), tf.nest.flatten(timed), strict=True):
    assert (a.numpy() == b.numpy()).all()

  schedule = task.Plan().schedule
  spans = stopwatch_lib.to_timeline(watch.actions(), times.numpy(), schedule)
  recomputed = [s for s in spans if s.action.kind == timeline.RECOMPUTE]
  assert len(spans) - len(recomputed) == sum(map(len, schedule))
  # In the I of stages 1 to 3, and of stage 0, which has none, in the W.
  assert len(recomputed) == 4 * 4
  for device, actions in enumerate(schedule):
    mine = [s for s in spans if s.device == device and s not in recomputed]
    mine.sort(key=lambda s: (s.start, s.end))
    assert [s.action for s in mine] == list(actions)
    for before, after in zip(mine, mine[1:], strict=False):
      assert before.end <= after.start
      assert after.arrived <= after.start
  assert 0 < shares.recompute(spans) < 0.5
  assert 0 <= shares.transfer_wait(spans, 4) < 1
  assert 0 < timeline.bubble(spans) < 1
