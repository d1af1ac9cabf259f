"""The planner keeps within memory, finds what is fastest, and explains."""

import dataclasses
import itertools

import pytest
import tensorflow as tf
from lingvo.core import optimizer

from lingvo_gpipe import errors, layers
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.plan import search
from lingvo_gpipe.plan.machine import parse_bytes

_BATCH = 16


def _trace(size):
  block = layers.TransformerBlock.Params().Set(
    model_dim=32, hidden_dim=128, num_heads=2
  )
  blocks = [block.Copy().Set(name=f'block_{l}') for l in range(8)]
  loss = layers.SoftmaxCrossEntropy.Params().Set(
    name='loss', input_dim=32, num_classes=10
  )
  x = tf.TensorSpec([size, 16, 32], tf.float32)
  labels = tf.TensorSpec([size, 16], tf.int32)
  weights = tf.TensorSpec([size, 16], tf.float32)
  return plan_lib.trace_network(
    [*blocks, loss], (x,), (labels, weights), 0, optimizer.Adam.ParamsB()
  )


def _planner(memory=None, **wish):
  wish = {'num_devices': 4, 'batch_size': _BATCH, **wish}
  machine = plan_lib.Machine(memory=memory and (memory,), flops=1e9)
  return search.Planner(_trace, machine, search.Wish(**wish))


def _least_bytes(**wish):
  """Peak bytes of the plan that an unlimited machine gets."""
  return max(_planner(**wish).fastest().forecast.device_bytes)


def test_finds_the_fastest_of_all_choices():
  planner = _planner(num_micro_batches=8, remat='none')
  best = planner.fastest()
  everything = [
    planner.evaluate(choice).forecast.step_seconds
    for choice in planner._choices(planner._wish)
  ]
  assert len(everything) > 10
  assert best.forecast.step_seconds <= min(everything) * search._AS_FAST
  assert best.choice.num_devices == 4


def test_slots_are_twice_the_weights_of_adam():
  network = _trace(2)
  for trace, slots in zip(network.traces, network.slot_bytes, strict=True):
    assert slots == 2 * trace.param_bytes


@pytest.mark.parametrize('share', [0.95, 0.8, 0.65])
def test_plans_keep_within_memory_and_more_of_it_is_never_slower(share):
  fixed = {'num_stages': 4, 'num_micro_batches': 8, 'schedule': '1f1b'}
  whole = _least_bytes(**fixed, remat='none')
  within = _planner(share * whole, **fixed).fastest()
  assert max(within.forecast.device_bytes) <= share * whole
  without = _planner(**fixed, remat='none').fastest()
  assert within.forecast.step_seconds >= without.forecast.step_seconds
  full = _planner(**fixed, remat='full').fastest()
  assert within.forecast.step_seconds <= full.forecast.step_seconds * 1.2


def test_slow_devices_get_smaller_stages():
  planner = _planner(
    num_stages=2, num_micro_batches=4, schedule='gpipe', remat='none'
  )
  machine = dataclasses.replace(planner._machine, speeds=(1.0, 3.0, 1.0, 1.0))
  cuts = [stage.layers for stage in planner.on(machine).fastest().plan.stages]
  assert len(cuts[0]) == 2
  assert len(cuts[1]) == 7


def test_what_does_not_fit_is_told_with_what_would():
  fixed = {'num_stages': 2, 'num_micro_batches': 4, 'schedule': '1f1b'}
  planner = _planner(0.8e6, **fixed)
  with pytest.raises(errors.UserError, match='No plan fits') as caught:
    planner.fastest()
  message = str(caught.value)
  advised = dict(
    part.split('=')
    for part in message.split('fit: ')[1].strip('.').split('; or ')
  )
  assert 'device_memory' in advised
  for field, value in advised.items():
    if field == 'device_memory':
      memory = parse_bytes(value, field) * 1.01
      found = _planner(memory, **fixed, remat='budget').fastest()
      assert max(found.forecast.device_bytes) <= memory
    else:
      _planner(0.8e6, **{**fixed, field: int(value)}).fastest()


def test_every_schedule_and_remat_has_a_forecast():
  for schedule, remat in itertools.product(
    ('gpipe', 'interleaved', 'zbv'), ('full', 'except_last', 'revolve:2')
  ):
    planner = _planner(
      num_stages=4, num_micro_batches=5, schedule=schedule, remat=remat
    )
    forecast = planner.fastest().forecast
    assert forecast.recompute_share > 0
    assert 0 < forecast.bubble < 1
    assert forecast.step_seconds > 0


@pytest.mark.parametrize(
  'text, value',
  [('16GiB', 16 * 2**30), ('8 GB', 8e9), ('1.5M', 1.5e6), ('4096', 4096)],
)
def test_sizes_are_read(text, value):
  assert parse_bytes(text, 'device_memory') == value


@pytest.mark.parametrize('text', ['16 gallons', '-1GB', '', '0', 'GiB'])
def test_wrong_sizes_name_the_field(text):
  with pytest.raises(errors.UserError, match='device_memory='):
    parse_bytes(text, 'device_memory')


def test_numbers_for_other_devices_are_refused():
  machine = plan_lib.Machine(memory=(1.0, 2.0))
  with pytest.raises(errors.UserError, match='2 numbers for 3 devices'):
    machine.check(3)
