"""Training a few steps in a test."""

import functools

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import pipeline_task, randomness


def make_task(model, **pipeline) -> pipeline_task.PipelineTask:
  """Builds the task of a model class, with fields of its pipeline changed."""
  p = model().Task().Set(random_seed=1)
  p.input = model().Train().Set(random_seed=1)
  p.pipeline.Set(**pipeline)
  return p.Instantiate()


def losses(model, steps: int, **pipeline) -> list[np.float32]:
  """Trains `steps` steps from step 0 and returns each loss, exactly."""
  task = make_task(model, **pipeline)
  task.CreateSlots()
  py_utils.GetGlobalStep().assign(0)
  step = tf.function(task.TrainStep, autograph=False)
  batches = iter(task.input.datasource.GetDataset())
  return [step(next(batches)).loss.numpy() for _ in range(steps)]


def forward_backward(task, batch, stopwatch=None):
  """Runs a mini-batch through the pipeline of a task."""
  inputs, targets = pipeline_task.split_batch(task.params, batch)
  return task.pipeline.ForwardBackward(
    task.theta.pipeline, inputs, targets, stopwatch
  )


def num_matrix_products(task) -> int:
  """Counts matrix products in all calls of a step."""
  batch = next(iter(task.input.datasource.GetDataset()))
  step = tf.function(functools.partial(forward_backward, task), autograph=False)
  definition = step.get_concrete_function(batch).graph.as_graph_def()
  bodies = {f.signature.name: f.node_def for f in definition.library.function}

  def count(nodes):
    total = 0
    for node in nodes:
      total += node.op in ('MatMul', 'BatchMatMulV2', 'Einsum')
      if 'f' in node.attr:
        total += count(bodies[node.attr['f'].func.name])
    return total

  return count(definition.node)


def plain_losses(model, steps: int) -> list[np.float32]:
  """Trains the model's layers on one device, whole batches, under a tape.

  Uses none of the pipeline: layer after layer, TensorFlow's own gradients, and
  Lingvo's Learner. Only the gradient of the embedding is made dense: Lingvo
  takes the norm of IndexedSlices without adding up rows that come twice.
  """
  task = make_task(model, num_stages=1)
  task.CreateSlots()
  [learner] = task.learners
  py_utils.GetGlobalStep().assign(0)

  @tf.function(autograph=False)
  def step(batch):
    micro_batch = randomness.MicroBatch(
      step=tf.convert_to_tensor(py_utils.GetGlobalStep()),
      first_example=tf.constant(0, tf.int64),
      num_examples=batch.ids.shape[0],
    )
    with tf.GradientTape() as tape:
      args = (batch.ids,)
      for name, layer in task.pipeline.children.items():
        if name == 'softmax':
          args += (batch.labels, batch.weights)
        seed = tf.constant(randomness.layer_seed(1, name), tf.int64)
        with randomness.scope(name, seed, micro_batch):
          args = (layer.FProp(layer.theta, *args),)

    def dense_gradients(loss, variables, *unused_args):
      gradients = tape.gradient(loss, variables)
      return [tf.convert_to_tensor(g) for g in gradients]

    learner._CustomComputeGradientsFn = lambda: dense_gradients
    # Tied weights are in the list more than once.
    distinct = {v.ref(): v for v in task.vars.pipeline.Flatten()}.values()
    learner.Apply(args[0], py_utils.NestedMap(v=list(distinct)))
    py_utils.GetGlobalStep().assign_add(1)
    return args[0].loss[0]

  batches = iter(task.input.datasource.GetDataset())
  return [step(next(batches)).numpy() for _ in range(steps)]


def relative_difference(a, b) -> np.ndarray:
  a, b = np.array(a, np.float64), np.array(b, np.float64)
  return np.abs(a - b) / np.abs(b)
