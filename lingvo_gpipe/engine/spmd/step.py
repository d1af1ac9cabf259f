"""The training step as one pure function of arrays: what XLA compiles.

    state, batch -> state, metrics

    for each micro-batch: layers before        (outside of the pipeline)
    pipeline forward                           (pipeline.py)
    for each micro-batch: layers after, loss, and their gradients
    pipeline backward
    for each micro-batch: gradients of layers before
    clipping; for each layer of a core: the optimizer's update
"""

from collections.abc import Sequence

import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe.cost import apart
from lingvo_gpipe.engine.spmd import (
  chain,
  layout,
  loops,
  pipeline,
  updates,
)
from lingvo_gpipe.engine.spmd.mesh import STAGE

Tensors = Sequence[tf.Tensor]

# What a step returns beside the metrics of the loss.
_SCALARS = ('weight', 'grad_norm', 'learning_rate')


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
    return chain.Rng(tf.constant(self.seeds, tf.int64), step, first_example)


class TrainStep:
  """One step of synchronous SGD."""

  def __init__(
    self,
    shape: pipeline.Shape,
    before: Outside,
    after: Outside,
    stage_layer: pipeline.StageLayer,
    carried: Sequence[tf.TensorSpec],
    stage_weights: Sequence[layout.Entry],
    outside_weights: Sequence[layout.Entry],
    stage_seeds,
    learner,
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
      stage_weights: entries [stages, layers a core, ...].
      outside_weights: entries of all others.
      stage_seeds: int64 [stages, layers a core].
      learner: Params of Lingvo's Learner.
      loss_name: the metric to minimise.
      targets: entries of what the loss takes of a batch.
    """
    self._shape = shape
    self._mesh = shape.mesh
    self._before = before
    self._after = after
    self._carried = carried
    self._stage_seeds = stage_seeds
    self._loss_name = loss_name
    self._pipeline = pipeline.Pipeline(shape, stage_layer, carried)
    self._learner_params = learner
    self._learner = apart.build_apart(_build_learner, learner)
    self.weights = [*stage_weights, *outside_weights]
    self._num_stage_weights = len(stage_weights)
    known = {}
    self._updates = []
    for j, entry in enumerate(self.weights):
      row = entry.spec.shape[2:] if j < len(stage_weights) else entry.spec.shape
      key = (entry.spec.dtype, *row)
      if key not in known:
        spec = tf.TensorSpec(row, entry.spec.dtype)
        known[key] = updates.Update(learner.optimizer, spec)
      self._updates.append(known[key])
    self.slots = [
      [layout.like(entry, slot) for slot in update.slots]
      for entry, update in zip(self.weights, self._updates, strict=True)
    ]
    scalar = tf.TensorSpec([], tf.float32)
    self.shared = [
      layout.whole(name, scalar) for name in self._updates[0].shared
    ]
    self.global_step = layout.whole(
      'global_step', tf.TensorSpec([], tf.int64)
    )
    self._metric_names = self._find_metric_names(targets)

  @property
  def scalars(self) -> list[str]:
    """The names of what a step returns beside the state."""
    return sorted([*self._metric_names, *_SCALARS])

  @property
  def state(self) -> list[layout.Entry]:
    """The entries of all state, in the order of the step's arguments."""
    slots = [entry for slots in self.slots for entry in slots]
    return [*self.weights, *slots, *self.shared, self.global_step]

  def __call__(
    self, state: Tensors, inputs: Tensors, targets: Tensors
  ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
    """Runs one step.

    Args:
      state: arrays as in `self.state`.
      inputs: of the first layer, each [batch, ...].
      targets: of the loss.

    Returns:
      (the new state, scalars: averages of all metrics, `weight`, `grad_norm`
      before clipping, `learning_rate`).
    """
    state = layout.split_all(self._mesh, self.state, state)
    weights, slots, shared, step = self._sort(state)
    one = tf.cast(step >= 0, tf.float32)
    metrics, gradients = self.gradients(weights, step, one, inputs, targets)
    total = metrics[self._loss_name][1]
    scale = tf.math.reciprocal_no_nan(total)
    with py_utils.GlobalStepContext(step):
      rate = self._learner.LearningRate()
      norm, factor = self._adjust(weights, gradients, scale)
    weights, slots, shared = self._update(
      weights, slots, shared, gradients, scale, factor, rate
    )
    new_state = [*weights, *[t for s in slots for t in s], *shared, step + 1]
    scalars = {
      name: tf.math.divide_no_nan(value, weight)
      for name, (value, weight) in metrics.items()
    }
    scalars.update(weight=total, grad_norm=norm, learning_rate=rate)
    return layout.split_all(self._mesh, self.state, new_state), scalars

  def gradients(self, weights, step, one, inputs, targets):
    """Returns sums over all examples: metrics as (sum, weight), gradients."""
    stage_weights = weights[: self._num_stage_weights]
    outside = weights[self._num_stage_weights :]
    entries = self.weights[self._num_stage_weights :]
    inputs, targets = self._micro_batches(inputs), self._micro_batches(targets)
    for_stages = pipeline.Weights(
      stage_weights,
      self._mesh.split(
        tf.constant(self._stage_seeds, tf.int64), (STAGE, None)
      ),
      step,
      one,
    )
    kept, results = self._pipeline.empty()
    count = self._shape.num_micro_batches

    def bring_in(i, *kept):
      values = self._run_before(outside, one, step, inputs, i)
      return self._pipeline.bring_in(kept, i, values)

    kept = loops.loop(count, bring_in, kept)
    kept, results = self._pipeline.forward(for_stages, kept, results)
    sums = [
      self._mesh.split(tf.zeros(e.spec.shape, e.spec.dtype), e.split)
      for e in entries
    ]
    names = self._metric_names

    def finish(i, *tensors):
      totals, rest = tensors[: 2 * len(names)], tensors[2 * len(names) :]
      results, sums = rest[: len(kept)], rest[len(kept) :]
      values = self._pipeline.read_result(results, i)
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
      results = self._pipeline.write_result(
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
        cotangents = self._pipeline.read_input_gradient(kept, i)
        dtheta = self._back_before(outside, one, step, inputs, cotangents, i)
        return self._add(sums, entries, self._before.places, dtheta)

      sums = loops.loop(count, go_back, sums)
    metrics = {
      name: (totals[2 * j], totals[2 * j + 1]) for j, name in enumerate(names)
    }
    return metrics, [*stage_gradients, *sums]

  def _sort(self, state):
    count = len(self.weights)
    weights, rest = state[:count], state[count:]
    slots = []
    for entries in self.slots:
      slots.append(rest[: len(entries)])
      rest = rest[len(entries) :]
    return weights, slots, rest[:-1], rest[-1]

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
    entries = self.weights[self._num_stage_weights :]
    with tf.__internal__.FuncGraph('metrics').as_default():

      def placeholder(dtype, shape):
        return tf.compat.v1.placeholder(dtype, shape)

      specs = [entries[j].spec for j in self._after.places]
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

  def _adjust(self, weights, gradients, scale):
    """Returns the norm of all gradients and what the Learner scales them by."""
    var_grads = py_utils.NestedMap(
      v=[
        py_utils.VarGrad(w, g * tf.cast(scale, g.dtype))
        for w, g in zip(weights, gradients, strict=True)
      ]
    )
    self._learner.AdjustGradients(var_grads)
    stats = self._learner._eval_metrics
    return stats['grad_norm/all'][0], stats['grad_scale_all'][0]

  def _update(self, weights, slots, shared, gradients, scale, factor, rate):
    """Returns new weights, slots and shared variables."""

    new_shared = shared
    count = self._num_stage_weights
    new_weights, new_slots = list(weights), [list(s) for s in slots]
    for j in range(count, len(weights)):
      new_weights[j], new_slots[j], new_shared = self._updates[j](
        weights[j], slots[j], shared, _adjusted(gradients[j], scale, factor), rate
      )
    if count:
      flat = self._update_stages(
        weights[:count],
        slots[:count],
        gradients[:count],
        [rate, scale, factor, *shared],
      )
      new_weights[:count] = flat[:count]
      flat = iter(flat[count:])
      for j in range(count):
        new_slots[j] = [next(flat) for _ in slots[j]]
    if not new_weights[count:]:
      *_, new_shared = self._updates[0](
        weights[0], slots[0], shared, gradients[0], rate
      )
    return new_weights, new_slots, new_shared

  def _update_stages(self, weights, slots, gradients, scalars):
    """Updates layer by layer, where the arrays are."""
    sizes = [len(s) for s in slots]
    flat_slots = [t for s in slots for t in s]
    changed = [*weights, *flat_slots]

    def on_core(*tensors):
      rate, scale, factor, *shared = tensors[: len(scalars)]
      arrays = [t[0] for t in tensors[len(scalars) :]]
      gradients, changed = arrays[: len(weights)], arrays[len(weights) :]

      def update_layer(l, *changed):
        changed = list(changed)
        place = len(weights)
        for j, update in enumerate(self._updates[: len(weights)]):
          mine = slice(place, place + sizes[j])
          gradient = loops.take(gradients[j], l)
          gradient = _adjusted(gradient, scale, factor)
          weight, new, _ = update(
            loops.take(changed[j], l),
            [loops.take(t, l) for t in changed[mine]],
            shared,
            gradient,
            rate,
          )
          changed[j] = loops.put(changed[j], weight, l)
          changed[mine] = [
            loops.put(t, n, l) for t, n in zip(changed[mine], new, strict=True)
          ]
          place += sizes[j]
        return changed

      done = loops.loop(self._shape.layers_per_core, update_layer, changed)
      return [t[None] for t in done]

    split = lambda t: (STAGE, *[None] * (t.shape.rank - 1))
    return self._mesh.region(
      on_core,
      [
        *[(t, ()) for t in scalars],
        *[(t, split(t)) for t in [*gradients, *changed]],
      ],
      [split(t) for t in changed],
    )


def _adjusted(gradient, scale, factor):
  """Returns the average gradient, clipped as the Learner wants it."""
  gradient = gradient * tf.cast(scale, gradient.dtype)
  pair = py_utils.NestedMap(v=py_utils.VarGrad(gradient, gradient))
  return py_utils.ApplyGradMultiplier(pair, factor).v.grad


def _build_learner(p):
  with tf.Graph().as_default():
    return p.Instantiate()
