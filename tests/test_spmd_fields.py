"""What the spmd engine refuses, and what it advises."""

import pytest
import small_models
import spmd_runs
import tensorflow as tf
from lingvo.core import layers

from lingvo_gpipe import errors


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'random_bits': 'philox'}, 'Set random_bits to hash'),
    ({'schedule': 'zb1p'}, 'cannot run the schedule zb1p: set schedule to one'),
    ({'batch_dim': 1}, 'batch_dim=1.*engine=mpmd'),
    ({'num_micro_batches': 5}, r'32 examples make \[6, 7\]'),
    (
      {'remat': 'budget', 'device_memory': '10KiB', 'num_stages': 2},
      r'a core needs at least [\d,]+KiB',
    ),
    (
      {'schedule': 'interleaved', 'num_stages': 6, 'num_micro_batches': 2},
      'set num_micro_batches to 3 or more',
    ),
    (
      {'schedule': 'interleaved', 'num_stages': 4},
      'num_stages=4 does not divide the equal layers',
    ),
    ({'num_stages': 9}, 'only 8 layers before the loss: set num_stages to 8'),
    (
      {'tied_weights': [('block_005', 'block_000')]},
      'block_00[05] is in a stage',
    ),
    (
      {'num_stages': 2, 'tied_weights': [('softmax/w', 'embedding/table')]},
      r'no weight embedding/table of shape \[16, 256\] for softmax/w',
    ),
  ],
)
def test_fields(fields, message):
  with pytest.raises(errors.UserError, match=message):
    spmd_runs.build(small_models.Micro, **fields)


def test_layers_with_state_are_named():
  class WithBatchNorm(small_models.Micro):
    def Task(self):
      p = super().Task()
      p.pipeline.layer_tpl.append(
        layers.BatchNormLayer.Params().Set(name='bn', dim=16)
      )
      return p

  with pytest.raises(errors.UserError, match='Layer "bn"'):
    spmd_runs.build(WithBatchNorm, num_stages=2)


def test_learner_that_looks_at_single_variables():
  p = spmd_runs.make_params(small_models.Micro, num_stages=2)
  p.train.bprop_variable_filter = 'ff'
  spec = p.input.Instantiate().datasource.GetDataset().element_spec
  with pytest.raises(errors.UserError, match='bprop_variable_filter=ff'):
    spmd_runs.spmd.build(p, spec)


def test_bfloat16_computes_on_float32_weights():
  p = spmd_runs.make_params(small_models.Micro, num_stages=2)
  p.fprop_dtype = tf.bfloat16
  spec = p.input.Instantiate().datasource.GetDataset().element_spec
  program = spmd_runs.spmd.build(p, spec)
  assert {e.spec.dtype for e in program.step.weights} == {tf.float32}


def test_budget_keeps_as_many_inputs_as_fit():
  kept = []
  for memory in ('1GiB', '730KiB', '640KiB'):
    _, program = spmd_runs.build(
      small_models.Micro, num_stages=1, remat='budget', device_memory=memory
    )
    kept.append(program.shape.num_segments)
  assert kept == [6, 3, 1]
