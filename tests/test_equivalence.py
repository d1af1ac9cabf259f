"""The same training of `Tiny` for every K, M, remat and schedule, dropout 0.1.

Long: `tools/test.sh -m slow`. On a smaller model: test_pipelining_layer.py.
"""

import helpers
import pytest
from lingvo_gpipe.params.lm import byte_lm

_STEPS = 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def reference():
  return helpers.losses(
    byte_lm.Tiny,
    _STEPS,
    num_stages=4,
    num_micro_batches=8,
    schedule='gpipe',
  )


@pytest.mark.parametrize('num_stages', [1, 2, 8])
def test_stages_do_not_change_a_bit(reference, num_stages):
  assert reference == helpers.losses(
    byte_lm.Tiny, _STEPS, num_stages=num_stages, num_micro_batches=8
  )


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_remat_does_not_change_a_bit(reference, remat):
  assert reference == helpers.losses(
    byte_lm.Tiny, _STEPS, num_stages=4, num_micro_batches=8, remat=remat
  )


@pytest.mark.parametrize(
  'schedule, num_stages',
  [('1f1b', 4), ('zb1p', 4), ('zb2p', 4), ('interleaved', 8), ('zbv', 8)],
)
def test_schedules_do_not_change_a_bit(reference, schedule, num_stages):
  assert reference == helpers.losses(
    byte_lm.Tiny,
    _STEPS,
    num_stages=num_stages,
    num_micro_batches=8,
    schedule=schedule,
  )


@pytest.mark.parametrize('num_micro_batches', [1, 2, 3, 4])
def test_micro_batches_change_rounding_only(reference, num_micro_batches):
  found = helpers.losses(
    byte_lm.Tiny, _STEPS, num_stages=4, num_micro_batches=num_micro_batches
  )
  difference = helpers.relative_difference(found, reference)
  print(f'M={num_micro_batches}: {difference.max():.1e} relative')
  assert difference[:5].max() < 1e-5
  assert difference.max() < 1e-4


def test_a_plain_loop_agrees(reference):
  found = helpers.plain_losses(byte_lm.Tiny, _STEPS)
  difference = helpers.relative_difference(found, reference)
  print(f'plain loop: {difference.max():.1e} relative')
  assert difference[:5].max() < 1e-5
  assert difference.max() < 1e-4
