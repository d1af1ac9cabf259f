"""The training step as one pure function of arrays: what XLA compiles.

state, batch -> gradients.py -> apply.py -> state, metrics
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.engine.spmd import apply, gradients, layout
from lingvo_gpipe.engine.spmd import mesh as mesh_lib

Tensors = Sequence[tf.Tensor]

# What a step returns beside the metrics of the loss.
_SCALARS = ('weight', 'grad_norm', 'learning_rate')


class TrainStep:
  """One step of synchronous SGD.

  Attributes:
    weights: entries of all weights, those of the stages first.
    state: entries of all state, in the order of the step's arguments.
    scalars: names of what a step returns beside the state.
  """

  def __init__(
    self,
    mesh: mesh_lib.Mesh,
    weights: Sequence[layout.Entry],
    compute: gradients.Gradients,
    update: apply.Apply,
    loss_name: str,
  ):
    self._mesh = mesh
    self._compute = compute
    self._update = update
    self._loss_name = loss_name
    self.weights = list(weights)
    self.state = [
      *weights,
      *[entry for slots in update.slots for entry in slots],
      *update.shared,
      layout.whole('global_step', tf.TensorSpec([], tf.int64)),
    ]
    self.scalars = sorted({*compute.metric_names, *_SCALARS})

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
    metrics, sums = self._compute(weights, step, inputs, targets)
    total = metrics[self._loss_name][1]
    weights, slots, shared, norm, rate = self._update(
      weights, slots, shared, sums, total, step
    )
    new_state = [*weights, *[t for s in slots for t in s], *shared, step + 1]
    scalars = {
      name: tf.math.divide_no_nan(value, weight)
      for name, (value, weight) in metrics.items()
    }
    scalars.update(weight=total, grad_norm=norm, learning_rate=rate)
    return layout.split_all(self._mesh, self.state, new_state), scalars

  def _sort(self, state):
    """Returns weights, slots of each, shared variables, and the global step."""
    count = len(self.weights)
    weights, rest = state[:count], state[count:]
    slots = []
    for entries in self._update.slots:
      slots.append(rest[: len(entries)])
      rest = rest[len(entries) :]
    return weights, slots, rest[:-1], rest[-1]
