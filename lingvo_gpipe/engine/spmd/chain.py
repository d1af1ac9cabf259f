"""Layers one after the other, as pure functions of flat lists of tensors."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer

from lingvo_gpipe import cost, errors, randomness
from lingvo_gpipe.cost import apart
from lingvo_gpipe.layers import call
from lingvo_gpipe.stage import functions

Tensors = Sequence[tf.Tensor]


class Chain:
  """Some layers; weights, arguments and results are flat lists, without Nones.

  Attributes:
    names: of the layers.
    weights: for each layer, the names of its weights below it.
    weight_specs: of all weights, in the order of `weights`.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayerParamsT],
    traces: Sequence[cost.LayerTrace],
    args: tuple,
    bits: str,
  ):
    """Builds the layers, without allocating their weights.

    Args:
      layers: Params, with names.
      traces: of the layers.
      args: structure of the arguments of the first; leaves are not looked at,
        but for Nones.
      bits: where random bits come from (randomness.py).

    Raises:
      UserError: a layer has weights that do not train.
    """
    self.names = [p.name for p in layers]
    self._layers = apart.build_apart(_build, layers)
    self._args = args
    self._bits = bits
    self.weights, self.weight_specs = [], []
    for trace, layer in zip(traces, self._layers, strict=True):
      if len(trace.weights) != len(layer.vars.Flatten()):
        raise errors.UserError(
          f'Layer "{layer.params.name}" has weights that do not train; the '
          'spmd engine has no place for them. Use engine=mpmd.'
        )
      self.weights.append([w.name for w in trace.weights])
      self.weight_specs += [
        tf.TensorSpec(w.shape, w.dtype) for w in trace.weights
      ]

  def run(
    self,
    theta: Tensors,
    args: Tensors,
    rng: functions.Rng,
    targets: Tensors = (),
  ) -> tuple:
    """Returns what the last layer does, as a structure.

    Args:
      theta: weights of all layers.
      args: the arguments of the first layer, without Nones.
      rng: what randomness depends on.
      targets: further arguments of the last layer.
    """
    num_examples = args[0].shape[0] if args else 0
    micro_batch = randomness.MicroBatch(
      rng.step, rng.first_example, num_examples, bits=self._bits
    )
    flowing = pack_present(self._args, args)
    start = 0
    for j, layer in enumerate(self._layers):
      stop = start + len(self.weights[j])
      if j == len(self._layers) - 1:
        flowing += tuple(targets)
      flowing = call.fprop(
        layer,
        self.names[j],
        layer.vars.Pack(theta[start:stop]),
        flowing,
        rng.seeds[j],
        micro_batch,
      )
      start = stop
    return flowing

  def forward(
    self, theta: Tensors, args: Tensors, rng: functions.Rng
  ) -> list[tf.Tensor]:
    """Returns the tensors that the last layer returns."""
    return present(self.run(theta, args, rng))


def vjp(function, theta, args, cotangents):
  """Returns gradients for weights and for arguments, zeros where there is none.

  Args:
    function: of (theta, args); returns tensors.
    theta: weights.
    args: tensors of any type.
    cotangents: of the results that are floats.

  Returns:
    (those of theta, those of the arguments that are floats).
  """
  theta = [tf.identity(w) for w in theta]
  args = [tf.identity(t) for t in args]
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch([*theta, *floats(args)])
    results = floats(function(theta, args))
  gradients = tape.gradient(
    results,
    [*theta, *floats(args)],
    output_gradients=list(cotangents),
    unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  gradients = [tf.convert_to_tensor(g) for g in gradients]
  return gradients[: len(theta)], gradients[len(theta) :]


def floats(tensors: Tensors) -> list[tf.Tensor]:
  return [t for t in tensors if t.dtype.is_floating]


def present(structure: Any) -> list:
  """Returns the leaves of a structure that are not None."""
  return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def pack_present(like: Any, leaves: Sequence) -> Any:
  """Returns a structure with these leaves, and Nones where `like` has them."""
  leaves = iter(leaves)
  flat = [
    None if leaf is None else next(leaves) for leaf in tf.nest.flatten(like)
  ]
  return tf.nest.pack_sequence_as(like, flat)


def _build(layers):
  with tf.Graph().as_default():
    return [p.Instantiate() for p in layers]
