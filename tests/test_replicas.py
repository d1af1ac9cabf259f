"""Data parallelism: copies of the pipeline that share a mini-batch."""

import functools

import helpers
import pytest
import small_models
import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import errors, micro_batches
from lingvo_gpipe.trainer import planning

_PIPELINE = {'num_stages': 2, 'num_micro_batches': 2}


class Tied(small_models.Micro):
  """Its table, on the first stage, predicts on the last."""

  def Task(self):
    p = super().Task()
    p.pipeline.loss_tpl.like_table = True
    p.pipeline.tied_weights = [('softmax/w', 'embedding/table')]
    return p


@functools.cache
def _losses(steps=5, model=small_models.Micro, **pipeline):
  return helpers.losses(model, steps, **{**_PIPELINE, **pipeline})


def _assert_agree(found, expected):
  difference = helpers.relative_difference(found, expected)
  print(f'{difference.max():.1e} relative')
  assert difference[:5].max() < 1e-5
  assert difference.max() < 1e-4


@pytest.mark.parametrize('num_replicas', [2, 3, 4])
def test_losses_agree_with_those_of_one(num_replicas):
  _assert_agree(_losses(num_replicas=num_replicas), _losses())


@pytest.mark.slow
@pytest.mark.parametrize('num_replicas', [2, 3, 4])
def test_losses_agree_over_many_steps(num_replicas):
  _assert_agree(_losses(20, num_replicas=num_replicas), _losses(20))


@pytest.mark.parametrize(
  'fields',
  [
    {'schedule': 'zb1p', 'remat': 'full'},
    {'schedule': 'zbv', 'num_stages': 4, 'remat': 'none'},
    # 11 examples in 3 micro-batches, and 10 in 2.
    {'micro_batch_size': 5, 'num_replicas': 3},
  ],
)
def test_every_schedule_and_remat_will_do(fields):
  _assert_agree(_losses(**{'num_replicas': 2, **fields}), _losses())


def test_spreading_variables_does_not_change_a_bit():
  spread = _losses(num_replicas=2, shard_optimizer=True)
  assert spread == _losses(num_replicas=2)


def test_tied_weights_may_be_spread():
  found = _losses(3, Tied, num_replicas=2, shard_optimizer=True)
  _assert_agree(found, _losses(3, Tied))


def _devices(variables):
  return {int(v.device.rpartition(':')[2]) for v in variables}


def test_variables_and_slots_are_on_the_first_replica_or_spread():
  names = []
  for shard, expected in ((False, {0}), (True, {0, 2})):
    task = helpers.make_task(
      small_models.Micro, num_replicas=2, shard_optimizer=shard, **_PIPELINE
    )
    variables = task.CreateSlots()
    names.append(variables.keys())
    plan = task.Plan()
    first_stage = [plan.names[l] for l in plan.stages[0].layers]
    weights = task.vars.pipeline.GetSlice(first_stage).Flatten()
    assert _devices(weights) == expected
    for v in weights:
      name = v.name.removesuffix(':0')
      slots = [s for n, s in variables.items() if name in n]
      assert len(slots) == 3  # The variable, and two of Adam.
      assert _devices(slots) == _devices([v])
  one = helpers.make_task(small_models.Micro, **_PIPELINE).CreateSlots()
  assert names == [one.keys()] * 2


def test_outputs_and_evaluation_are_those_of_one():
  one, many = (
    helpers.make_task(small_models.Micro, num_replicas=r, **_PIPELINE)
    for r in (1, 3)
  )
  batch = next(iter(one.input.datasource.GetDataset()))
  py_utils.GetGlobalStep().assign(7)
  outputs, losses = [], []
  for task in (one, many):
    run = tf.function(
      lambda batch, task=task: (
        task.pipeline.FProp(task.theta.pipeline, batch.ids),
        task.FPropTower(task.theta, batch)[0].loss,
      ),
      autograph=False,
    )
    output, loss = run(batch)
    outputs.append(output)
    losses.append(loss)
  # Equal masks: a dropped entry elsewhere would differ by much more.
  tf.debugging.assert_near(*outputs, rtol=1e-4, atol=1e-5)
  tf.debugging.assert_near(losses[0][0], losses[1][0], rtol=1e-6)
  assert losses[0][1] == losses[1][1]


def test_no_replica_waits_for_another_before_gradients_are_added():
  task = helpers.make_task(
    small_models.Micro, num_replicas=2, **_PIPELINE, remat='full'
  )
  batch = next(iter(task.input.datasource.GetDataset()))
  graph = (
    tf.function(
      functools.partial(helpers.forward_backward, task), autograph=False
    )
    .get_concrete_function(batch)
    .graph
  )
  calls = {device: [] for device in range(4)}
  for op in graph.get_operations():
    if op.type in ('PartitionedCall', 'StatefulPartitionedCall'):
      calls[int(op.device.rpartition(':')[2])].append(op)
  # Two forwards, zeros, two backwards; and one sum on the first replica, of
  # all of a stage's weights.
  assert [len(of_device) for of_device in calls.values()] == [7, 8, 5, 5]
  others = {op for device in (0, 1) for op in calls[device]}
  for device in (2, 3):
    for op in calls[device]:
      assert not others & _ancestors(op)


def _ancestors(op):
  found, pending = set(), [op]
  while pending:
    op = pending.pop()
    for before in [t.op for t in op.inputs] + list(op.control_inputs):
      if before not in found:
        found.add(before)
        pending.append(before)
  return found


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_replicas': 0}, 'num_replicas=0: at least 1'),
    ({'num_replicas': 5}, r'takes 10 devices, .* set num_replicas to 4 or'),
    ({'shard_optimizer': True}, 'num_replicas=1: set num_replicas to 2'),
    (
      {'num_replicas': 2, 'devices': ['CPU:0', 'CPU:1']},
      'names 2 devices, the schedule has 2 in each of 2 replicas',
    ),
    (
      {'num_replicas': 4, 'num_micro_batches': 9},
      "num_micro_batches=9, but a replica's share has only 8 examples",
    ),
  ],
)
def test_mistakes_are_explained(fields, message):
  with tf.Graph().as_default(), pytest.raises(errors.UserError, match=message):
    helpers.make_task(small_models.Micro, **{**_PIPELINE, **fields}).Plan()


def test_more_replicas_than_examples_or_devices_are_refused():
  p = small_models.Micro().Task().pipeline.Set(num_replicas=3)
  with pytest.raises(errors.UserError, match='set num_replicas to 2 or less'):
    micro_batches.shares(p, 2)
  with pytest.raises(errors.UserError, match='set num_replicas to 2 or less'):
    planning.num_devices(p, 2)
  assert planning.num_devices(p, 7) == 2
