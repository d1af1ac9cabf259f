"""The functions of a stage, traced once and called for every micro-batch.

    forward(theta, inputs, rng, num_examples) -> outputs, differentiable
    run_forward(...) -> outputs
    step(...)        -> a Step: forward and backward, in parts

All are kept out of line: the graph of a step has one node for a call however
many layers a stage has.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe import randomness
from lingvo_gpipe.layers import call
from lingvo_gpipe.plan import wiring as wiring_lib
from lingvo_gpipe.stage import calls
from lingvo_gpipe.stage import step as step_lib

Tensors = Sequence[tf.Tensor]


class Rng(NamedTuple):
  """What randomness depends on: int64 tensors, equal for equal examples.

  Attributes:
    seeds: [number of layers], from `randomness.layer_seed`.
    step: scalar, the global step.
    first_example: scalar, index in the mini-batch of the first example.
  """

  seeds: tf.Tensor
  step: tf.Tensor
  first_example: tf.Tensor


class StageFunctions:
  """Forward and backward of all stages of one structure.

  Weights, inputs and outputs are flat lists of tensors: weights as they are in
  the theta of one layer after the other, inputs as in `wiring.takes`, outputs
  as in `wiring.gives`, then `wiring.relays`, then the objective if there is a
  loss.
  """

  def __init__(
    self,
    names: Sequence[str],
    layers: Sequence[base_layer.BaseLayer],
    network: wiring_lib.Wiring,
    wiring: wiring_lib.StageWiring,
    batch_dim: int,
    loss_name: str | None,
    bits: str = 'philox',
  ):
    """Sets up the functions; they are traced when first called.

    Args:
      names: of the stage's layers.
      layers: the layers themselves.
      network: the wiring of all layers.
      wiring: what this stage exchanges.
      batch_dim: the dimension that counts examples.
      loss_name: the metric to minimise if the stage ends in the loss layer,
        whose outputs are metrics as (average, weight); else None.
      bits: where random bits come from (random_bits.py).
    """
    self._bits = bits
    self._names = tuple(names)
    self._layers = tuple(layers)
    self._network = network
    self._wiring = wiring
    self._batch_dim = batch_dim
    self._loss_name = loss_name
    self._templates = [layer.theta for layer in layers]
    weights = [w for theta in self._templates for w in theta.Flatten()]
    self._trained = [j for j, w in enumerate(weights) if _is_trained(w)]
    # How many weights of each layer train.
    self.trained_by_layer = [
      sum(map(_is_trained, theta.Flatten())) for theta in self._templates
    ]
    self._gradient_specs = [
      tf.TensorSpec(weights[j].shape, weights[j].dtype) for j in self._trained
    ]
    outputs = wiring.gives + wiring.relays
    self._awaiting = [outputs.index(v) for v in wiring.awaits]
    self._steps = {}
    self._forward_calls = {}
    self._accumulate_calls = {}
    self.forward = calls.out_of_line(self._forward)
    self.scale = calls.out_of_line(_scale)
    self.zeros = calls.out_of_line(self._zeros)

  def pack_gradients(self, gradients: Tensors) -> list[py_utils.NestedMap]:
    """Returns for each layer a NestedMap like its theta, None for no gradient.

    Args:
      gradients: of the trained weights of the stage.
    """
    flat = [None] * sum(len(theta.Flatten()) for theta in self._templates)
    for j, gradient in zip(self._trained, gradients, strict=True):
      flat[j] = gradient
    return self._pack(flat)

  def accumulate(self, sums: Tensors, terms: Tensors) -> list[tf.Tensor]:
    """Adds gradients of trained weights, of all of them or of some.

    Args:
      sums: added to where they are, so nobody else may use them.
      terms: to add.
    """
    key = tuple((t.dtype, *t.shape) for t in sums)
    if key not in self._accumulate_calls:
      self._accumulate_calls[key] = calls.Call(
        calls.out_of_line(_add).get_concrete_function(list(sums), list(terms))
      )
    return list(self._accumulate_calls[key]([*sums, *terms]))

  def run_forward(
    self, theta: Tensors, inputs: Tensors, rng: Rng, num_examples: int
  ) -> list[tf.Tensor]:
    """Returns what `forward` does, by a call that has no gradient."""
    if num_examples not in self._forward_calls:
      self._forward_calls[num_examples] = calls.Call(
        self.forward.get_concrete_function(theta, inputs, rng, num_examples)
      )
    return self._forward_calls[num_examples]([*theta, *inputs, *rng])

  def step(
    self, theta: Tensors, inputs: Tensors, rng: Rng, num_examples: int
  ) -> step_lib.Step:
    """Returns the parts that take a micro-batch like this one through."""
    if num_examples not in self._steps:
      self._steps[num_examples] = self._trace_step(
        theta, inputs, rng, num_examples
      )
    return self._steps[num_examples]

  def _trace_step(self, theta, inputs, rng, num_examples):
    graph = tf.__internal__.FuncGraph('stage')
    with graph.as_default():
      theta, inputs = _placeholders(theta), _placeholders(inputs)
      rng = Rng(*_placeholders(rng))
      trained = [theta[j] for j in self._trained]
      crossing = {v: t for v, t in zip(self._wiring.takes, inputs, strict=True)}
      boundaries = [crossing]
      with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(trained)
        tape.watch(self._differentiable(crossing))
        outputs = self._forward(theta, inputs, rng, num_examples, boundaries)
      targets = [outputs[j] for j in self._awaiting]
      cotangents = _placeholders(targets)
      objective = [] if self._loss_name is None else outputs[-1:]
      sources = trained, *map(self._differentiable, boundaries)
      dtrained, *dboundaries = tape.gradient(
        targets + objective,
        sources,
        output_gradients=cotangents + [tf.ones_like(t) for t in objective],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
      )
      gradients = _placeholders(dtrained)
      sums = iter(_add(gradients, dtrained))
      return step_lib.Step(
        graph=graph,
        theta=theta,
        inputs=[*inputs, *rng],
        cotangents=cotangents,
        gradients=gradients,
        outputs=outputs,
        layers=[
          step_lib.LayerCut(
            inputs=list(crossing.values()),
            dinputs=list(dinputs),
            sums=list(itertools.islice(sums, num_trained)),
          )
          for crossing, dinputs, num_trained in zip(
            boundaries, dboundaries, self.trained_by_layer, strict=True
          )
        ],
      )

  def _differentiable(self, crossing):
    """Returns those tensors of a boundary that have a gradient."""
    values = self._network.values
    return [t for v, t in crossing.items() if values[v].has_gradient]

  def _pack(self, flat):
    """Splits a stage's flat list and packs each layer's part like its theta."""
    packed, start = [], 0
    for template in self._templates:
      stop = start + len(template.Flatten())
      packed.append(template.Pack(flat[start:stop]))
      start = stop
    return packed

  def _zeros(self):
    # Not tf.zeros: a constant would be added to in place, for all steps.
    return [
      tf.raw_ops.Empty(shape=spec.shape, dtype=spec.dtype, init=True)
      for spec in self._gradient_specs
    ]

  def _forward(self, theta, inputs, rng, num_examples, boundaries=None):
    """Runs the layers; appends what crosses into each but the first."""
    values = dict(zip(self._wiring.takes, inputs, strict=True))
    thetas = self._pack(theta)
    micro_batch = randomness.MicroBatch(
      rng.step, rng.first_example, num_examples, self._batch_dim, self._bits
    )
    metrics = None
    for j, layer in enumerate(self._layers):
      wiring = self._network.layers[self._wiring.layers[j]]
      if j and boundaries is not None:
        crossing = self._crossing_into(j, values)
        boundaries.append(crossing)
        values.update(crossing)
      args = _arguments(wiring, values, self._network)
      metrics = call.fprop(
        layer, self._names[j], thetas[j], args, rng.seeds[j], micro_batch
      )
      for v, leaf in zip(wiring.made, tf.nest.flatten(metrics), strict=True):
        if v is not None:
          values[v] = leaf
    outputs = [values[v] for v in self._wiring.gives + self._wiring.relays]
    if self._loss_name is not None:
      outputs.append(_objective(metrics[0], self._loss_name))
    return outputs

  def _crossing_into(self, j, values):
    """Returns the values that layers from the stage's j-th on use, by id.

    Each as a tensor of its own, whose gradient is that of these layers alone.
    """
    later = self._network.layers[
      self._wiring.layers[j] : self._wiring.layers.stop
    ]
    used = frozenset().union(*(layer.used for layer in later))
    return {v: tf.identity(values[v]) for v in sorted(used & values.keys())}


def _is_trained(weight) -> bool:
  return (
    isinstance(weight, tf.Variable)
    and weight.trainable
    and weight.dtype.is_floating
  )


def _arguments(wiring, values, network):
  """Takes a layer's arguments out of `values`.

  Each use goes through an identity of its own, and leaves another behind for
  the users after it: the gradients of a value are then added pair by pair from
  its last user to its first, within a stage as across stages.
  """

  def take(v):
    if v is None:
      return None
    if v not in wiring.used:  # Handed on; the layer must not look at it.
      spec = network.values[v].spec
      return values.get(v, tf.zeros(spec.shape, spec.dtype))
    mine = tf.identity(values[v])
    values[v] = tf.identity(values[v])
    return mine

  return tf.nest.map_structure(take, wiring.args)


def _placeholders(tensors):
  return [tf.compat.v1.placeholder(t.dtype, t.shape) for t in tensors]


def _objective(metrics, loss_name):
  """Returns the loss times its weight: what a micro-batch adds to the sum."""
  average, weight = metrics[loss_name]
  return average * tf.stop_gradient(tf.cast(weight, average.dtype))


def _add(sums, terms):
  """Adds terms to sums where these are, which nobody else may use then."""
  return [
    _in_place(tf.raw_ops.InplaceAdd, a, b)
    for a, b in zip(sums, terms, strict=True)
  ]


def _scale(gradients, factor):
  """Scales gradients where they are."""
  return [
    _in_place(tf.raw_ops.InplaceUpdate, g, g * tf.cast(factor, g.dtype))
    for g in gradients
  ]


def _in_place(op, target, value):
  """Applies an op that works on rows to the whole of a tensor, as one row."""
  row = op(x=tf.reshape(target, [1, -1]), i=[0], v=tf.reshape(value, [1, -1]))
  return tf.reshape(row, target.shape)
