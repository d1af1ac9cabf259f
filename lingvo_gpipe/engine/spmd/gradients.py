"""A mini-batch forward and back: metrics, and gradients of all weights.

  for each micro-batch: layers before        (outside of the pipeline)
pipeline forward                             (pipeline.py)
  for each micro-batch: layers after, loss, and their gradients
pipeline backward
  for each micro-batch: gradients of layers before

The weights of layers outside of the pipeline are spread over the cores, which
XLA has work on them together.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.engine.spmd import (
  chain,
  core,
  layout,
  loops,
  pipeline,
  rooms,
)
from lingvo_gpipe.engine.spmd.mesh import STAGE
from lingvo_gpipe.stage import functions

Tensors = Sequence[tf.Tensor]


class Outside:
  """The layers before or after the pipeline, and where their weights are.

  Attributes:
    chain: the layers.
    places: for each of their weights, its index among all outside weights.
    seeds: of the layers.
  """

  def __init__(self, layers: chain.Chain, places: Sequence[int], seeds):
    self.chain = layers
    self.places = list(places)
    self.seeds = seeds

  def rng(self, shape, i, step):
    first_example = tf.cast(i, tf.int64) * shape.micro_batch_size
    return functions.Rng(tf.constant(self.seeds, tf.int64), step, first_example)


class Gradients:
  """Computes sums over the examples of a mini-batch."""

  def __init__(
    self,
    shape: core.Shape,
    before: Outside,
    after: Outside,
    stage_layer: core.StageLayer,
    carried: Sequence[tf.TensorSpec],
    num_stage_weights: int,
    outside_weights: Sequence[layout.Entry],
    stage_seeds,
    loss_name: str,
    targets: Sequence[layout.Entry],
  ):
    """Sets up.

    Args:
      shape: of the pipeline.
      before: layers before the stages.
      after: layers after them; the last is the loss.
      stage_layer: of which the stages are made.
      carried: specs of what goes from stage to stage, for a micro-batch.
      num_stage_weights: arrays [stages, layers a core, ...], the first weights.
      outside_weights: entries of all others.
      stage_seeds: int64 [stages, layers a core].
      loss_name: the metric to minimise.
      targets: entries of what the loss takes of a batch.
    """
    self._shape = shape
    self._mesh = shape.mesh
    self._before = before
    self._after = after
    self._carried = carried
    self._num_stage_weights = num_stage_weights
    self._entries = outside_weights
    self._stage_seeds = stage_seeds
    self._loss_name = loss_name
    self._pipeline = pipeline.Pipeline(shape, stage_layer, carried)
    self._rooms = rooms.Rooms(shape, carried)
    self.metric_names = self._find_metric_names(targets)

  def __call__(
    self,
    weights: Tensors,
    step: tf.Tensor,
    inputs: Tensors,
    targets: Tensors,
  ) -> tuple[dict[str, tuple[tf.Tensor, tf.Tensor]], list[tf.Tensor]]:
    """Returns sums over all examples.

    Args:
      weights: of stages, then of layers outside.
      step: int64 scalar, the global step.
      inputs: of the first layer, each [batch, ...].
      targets: of the loss.

    Returns:
      (metrics, each as (sum, weight); gradients of all weights)
    """
    # 1.0, but not for the compiler; see pipeline.Weights.
    one = tf.cast(step >= 0, tf.float32)
    stage_weights = weights[: self._num_stage_weights]
    outside = weights[self._num_stage_weights :]
    entries = self._entries
    inputs, targets = self._micro_batches(inputs), self._micro_batches(targets)
    for_stages = pipeline.Weights(
      stage_weights,
      self._mesh.split(tf.constant(self._stage_seeds, tf.int64), (STAGE, None)),
      step,
      one,
    )
    kept, results = self._rooms.empty()
    count = self._shape.num_micro_batches

    def bring_in(i, *kept):
      values = self._run_before(outside, one, step, inputs, i)
      return self._rooms.bring_in(kept, i, values)

    kept = loops.loop(count, bring_in, kept)
    kept, results = self._pipeline.forward(for_stages, kept, results)
    sums = [
      self._mesh.split(tf.zeros(e.spec.shape, e.spec.dtype), e.split)
      for e in entries
    ]
    names = self.metric_names

    def finish(i, *tensors):
      totals, rest = tensors[: 2 * len(names)], tensors[2 * len(names) :]
      results, sums = rest[: len(kept)], rest[len(kept) :]
      values = self._rooms.read_result(results, i)
      metrics, dvalues, dtheta = self._run_after(
        outside, one, step, values, targets, i
      )
      totals = [
        total + more
        for total, more in zip(
          totals, [t for n in names for t in metrics[n]], strict=True
        )
      ]
      gradients = iter(dvalues)
      results = self._rooms.write_result(
        results,
        i,
        [next(gradients) if v.dtype.is_floating else v for v in values],
      )
      sums = self._add(sums, entries, self._after.places, dtheta)
      return [*totals, *results, *sums]

    zeros = [tf.zeros([])] * (2 * len(names))
    done = loops.loop(count, finish, [*zeros, *results, *sums])
    totals, done = done[: len(zeros)], done[len(zeros) :]
    results, sums = done[: len(kept)], done[len(kept) :]
    kept, stage_gradients = self._pipeline.backward(for_stages, kept, results)
    if self._before.places:

      def go_back(i, *sums):
        cotangents = self._rooms.read_input_gradient(kept, i)
        dtheta = self._back_before(outside, one, step, inputs, cotangents, i)
        return self._add(sums, entries, self._before.places, dtheta)

      sums = loops.loop(count, go_back, sums)
    metrics = {
      name: (totals[2 * j], totals[2 * j + 1]) for j, name in enumerate(names)
    }
    return metrics, [*stage_gradients, *sums]

  def _micro_batches(self, batch):
    """Returns [micro-batches, examples, ...] of each tensor of a batch."""
    shape = self._shape
    sizes = [shape.num_micro_batches, shape.micro_batch_size]
    return [tf.reshape(t, sizes + t.shape[1:].as_list()) for t in batch]

  def _theta(self, side, outside, one):
    return [outside[j] * one for j in side.places]

  def _run_before(self, outside, one, step, inputs, i):
    rng = self._before.rng(self._shape, i, step)
    rows = [loops.take(t, i) for t in inputs]
    theta = self._theta(self._before, outside, one)
    return self._before.chain.forward(theta, rows, rng)

  def _back_before(self, outside, one, step, inputs, cotangents, i):
    rng = self._before.rng(self._shape, i, step)
    rows = [loops.take(t, i) for t in inputs]

    def forward(theta, args):
      return self._before.chain.forward(theta, args, rng)

    theta = self._theta(self._before, outside, one)
    dtheta, _ = chain.vjp(forward, theta, rows, cotangents)
    return dtheta

  def _find_metric_names(self, targets: Sequence[layout.Entry]) -> list[str]:
    """Returns the names of the loss's metrics, by tracing it."""
    size = self._shape.micro_batch_size
    with tf.__internal__.FuncGraph('metrics').as_default():

      def placeholder(dtype, shape):
        return tf.compat.v1.placeholder(dtype, shape)

      specs = [self._entries[j].spec for j in self._after.places]
      [metrics] = self._after.chain.run(
        [placeholder(s.dtype, s.shape) for s in specs],
        [placeholder(s.dtype, s.shape) for s in self._carried],
        self._after.rng(self._shape, 0, tf.constant(0, tf.int64)),
        [placeholder(e.spec.dtype, [size, *e.spec.shape[1:]]) for e in targets],
      )
    return sorted(metrics)

  def _run_after(self, outside, one, step, values, targets, i):
    """Returns metrics as sums, and gradients for values and for weights."""
    rng = self._after.rng(self._shape, i, step)
    rows = [loops.take(t, i) for t in targets]
    theta = [tf.identity(w) for w in self._theta(self._after, outside, one)]
    sources = [*theta, *chain.floats(values)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(sources)
      [metrics] = self._after.chain.run(theta, values, rng, rows)
      sums = {}
      for name, (average, weight) in metrics.items():
        weight = tf.stop_gradient(tf.cast(weight, average.dtype))
        sums[name] = (average * weight, weight)
      loss = sums[self._loss_name][0]
    gradients = [
      tf.convert_to_tensor(g)
      for g in tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
      )
    ]
    metrics = {
      name: tuple(tf.cast(t, tf.float32) for t in pair)
      for name, pair in sums.items()
    }
    return metrics, gradients[len(theta) :], gradients[: len(theta)]

  def _add(self, sums, entries, places, terms):
    """Returns sums with the terms added at their places."""
    sums = list(sums)
    for j, term in zip(places, terms, strict=True):
      new = sums[j] + tf.cast(term, sums[j].dtype)
      sums[j] = self._mesh.split(new, entries[j].split)
    return sums
