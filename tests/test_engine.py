"""What the graph of a step is made of."""

import itertools

import helpers
import pytest
import small_models
import tensorflow as tf

from lingvo_gpipe import pipeline_task

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')


class OneBlock(small_models.Micro):
  NUM_BLOCKS = 4


class ManyBlocks(small_models.Micro):
  NUM_BLOCKS = 12


def _graph(model, **pipeline):
  task = helpers.make_task(model, num_stages=4, **pipeline)

  def forward_backward(batch):
    inputs, targets = pipeline_task.split_batch(task.params, batch)
    metrics, gradients = task.pipeline.ForwardBackward(
      task.theta.pipeline, inputs, targets
    )
    return metrics, gradients

  step = tf.function(forward_backward, autograph=False)
  batch = next(iter(task.input.datasource.GetDataset()))
  return step.get_concrete_function(batch).graph


def _num_calls(graph):
  return sum(op.type in _CALLS for op in graph.get_operations())


@pytest.mark.parametrize(
  'schedule, actions', [('gpipe', 'FB'), ('1f1b', 'FB'), ('zb1p', 'FIW')]
)
@pytest.mark.parametrize('remat', ['none', 'full', 'except_last'])
def test_nodes_grow_with_micro_batches_not_with_layers(
  schedule, actions, remat
):
  few, twice, many = (
    _graph(model, num_micro_batches=m, remat=remat, schedule=schedule)
    for model, m in ((OneBlock, 4), (OneBlock, 8), (ManyBlocks, 4))
  )
  assert _num_calls(few) == _num_calls(many)
  more_actions = len(actions) * 4 * 4
  assert _num_calls(twice) - _num_calls(few) <= more_actions
  more_nodes = len(twice.get_operations()) - len(few.get_operations())
  assert more_nodes <= 3 * more_actions
  # Beyond calls, nodes are a few for each variable and none per layer call.
  per_variable = len(many.get_operations()) - len(few.get_operations())
  assert per_variable <= 4 * 8 * 10


def test_actions_of_a_device_follow_each_other():
  graph = _graph(OneBlock, num_micro_batches=4, remat='full')
  for k in range(4):
    calls = [
      op
      for op in graph.get_operations()
      if op.type in _CALLS and op.device.endswith(f'CPU:{k}')
    ]
    # Four forwards, zeros for the gradients, four backwards; then come the
    # calls that only look at results.
    for before, after in itertools.pairwise(calls[:9]):
      assert before in _ancestors(after)


def _ancestors(op):
  """Returns all ops that must run before `op`."""
  found, pending = set(), [op]
  while pending:
    op = pending.pop()
    for before in [t.op for t in op.inputs] + list(op.control_inputs):
      if before not in found:
        found.add(before)
        pending.append(before)
  return found


def test_stages_see_values_not_variables():
  # A stage that read the global step itself could see that of the next step.
  graph = _graph(OneBlock, num_micro_batches=4, remat='except_last')
  for op in graph.get_operations():
    if op.type in _CALLS:
      assert all(t.dtype != tf.resource for t in op.inputs), op.name
