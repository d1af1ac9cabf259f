"""Clipping and the optimizer's update, by Lingvo's Learner, on arrays.

Arrays of stages are updated layer by layer in a loop, each where it is: an
update of a whole array would hold parts of it twice.
"""

from collections.abc import Sequence

import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe.cost import apart
from lingvo_gpipe.engine.spmd import layout, loops, updates
from lingvo_gpipe.engine.spmd import mesh as mesh_lib

Tensors = Sequence[tf.Tensor]


class Apply:
  """Applies gradients to weights.

  Attributes:
    slots: for each weight, the entries of the optimizer's slots.
    shared: entries of the optimizer's variables that belong to all weights.
  """

  def __init__(
    self,
    learner,
    mesh: mesh_lib.Mesh,
    layers_per_core: int,
    stage_weights: Sequence[layout.Entry],
    outside_weights: Sequence[layout.Entry],
  ):
    """Traces the updates.

    Args:
      learner: Params of Lingvo's Learner.
      mesh: the cores.
      layers_per_core: rows of a core in an array of stages.
      stage_weights: entries [stages, layers a core, ...].
      outside_weights: entries of all others.
    """
    self._mesh = mesh
    self._layers_per_core = layers_per_core
    self._learner = apart.build_apart(_build_learner, learner)
    self._num_stage_weights = len(stage_weights)
    entries = [*stage_weights, *outside_weights]
    known = {}
    self._updates = []
    for j, entry in enumerate(entries):
      row = entry.spec.shape[2:] if j < len(stage_weights) else entry.spec.shape
      key = (entry.spec.dtype, *row)
      if key not in known:
        spec = tf.TensorSpec(row, entry.spec.dtype)
        known[key] = updates.Update(learner.optimizer, spec)
      self._updates.append(known[key])
    self.slots = [
      [layout.like(entry, slot) for slot in update.slots]
      for entry, update in zip(entries, self._updates, strict=True)
    ]
    scalar = tf.TensorSpec([], tf.float32)
    self.shared = [
      layout.whole(name, scalar) for name in self._updates[0].shared
    ]

  def __call__(
    self,
    weights: Tensors,
    slots: Sequence[Tensors],
    shared: Tensors,
    gradients: Tensors,
    total: tf.Tensor,
    step: tf.Tensor,
  ):
    """Updates everything.

    Args:
      weights: all of them.
      slots: of each.
      shared: the optimizer's other variables.
      gradients: summed over the examples.
      total: weight of the examples.
      step: int64 scalar, the global step.

    Returns:
      (weights, slots, shared, norm of the average gradient before clipping,
      learning rate)
    """
    scale = tf.math.reciprocal_no_nan(total)
    with py_utils.GlobalStepContext(step):
      rate = self._learner.LearningRate()
      norm, factor = self._adjust(weights, gradients, scale)
    changed = self._update(
      weights, slots, shared, gradients, scale, factor, rate
    )
    return *changed, norm, rate

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
        weights[j],
        slots[j],
        shared,
        _adjusted(gradients[j], scale, factor),
        rate,
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

      done = loops.loop(self._layers_per_core, update_layer, changed)
      return [t[None] for t in done]

    def split(t):
      return mesh_lib.by_stage(t.shape.rank)

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
