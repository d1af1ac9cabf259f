"""Traces a layer on symbolic shapes: its costs, and how data runs through it.

The layer is built and called in a throw-away graph, so no variable is ever
allocated and a model of any size can be looked at on any machine:

    inputs   a    b    c          used:     a, b      (c is only handed on)
             |    |    |          outputs:  new, c    (the second is input 2)
           [ layer  ]  |
               |       |
    outputs   new      c
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, tshape

from lingvo_gpipe import errors, randomness
from lingvo_gpipe.cost import apart, backward, flops, memory, purity
from lingvo_gpipe.layers import call


@dataclasses.dataclass(frozen=True)
class Weight:
  """One variable; `name` is its own within the layer, such as `atten/w`."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def size(self) -> int:
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class LayerTrace:
  """What tracing one layer found.

  "Leaves" are the tensors of a nested structure in `tf.nest.flatten` order.

  Attributes:
    kind: the layer's class name.
    num_params: number of trainable weights.
    param_bytes: bytes of all its variables.
    trained_bytes: bytes of the gradients of its trainable weights.
    weights: those that are trained.
    fprop_flops: FLOPs of one FProp on the traced shapes.
    backward: what its backward pass costs.
    used_inputs: for each input leaf, whether the layer computes with it.
    outputs: structure (a tuple) of the outputs, `tf.TensorSpec`s and Nones.
    passed_inputs: for each output leaf, the index of the input leaf that it
      hands on untouched, or None if the layer made it.
  """

  kind: str
  num_params: int
  param_bytes: int
  trained_bytes: int
  weights: tuple['Weight', ...]
  fprop_flops: int
  backward: backward.BackwardCost
  used_inputs: tuple[bool, ...]
  outputs: tuple
  passed_inputs: tuple[int | None, ...]


def trace_layer(
  p: base_layer.BaseLayerParamsT, args: tuple, batch_dim: int = 0
) -> LayerTrace:
  """Traces the layer that `p` describes on inputs like `args`.

  Args:
    p: Params of any Lingvo layer, with a name.
    args: the structure of its FProp arguments: `tf.TensorSpec`s and Nones.
    batch_dim: which dimension counts the examples.

  Raises:
    UserError: the layer cannot be recomputed or cut out (purity.py), or its
      FProp does not accept these inputs.
  """
  return apart.build_apart(_trace, p, args, batch_dim)


def _trace(p, args, batch_dim) -> LayerTrace:
  with tf.Graph().as_default() as graph:
    layer = p.Instantiate()
    theta = layer.theta.Transform(_placeholder)
    inputs = tf.nest.map_structure(_placeholder, args)
    num_setup_ops = len(graph.get_operations())
    input_leaves = tf.nest.flatten(inputs)
    trained = [
      w
      for w, v in zip(theta.Flatten(), layer.vars.Flatten(), strict=True)
      if v.trainable and v.dtype.is_floating
    ]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch([*trained, *_differentiable(input_leaves)])
      outputs, rng = _call_symbolically(layer, p.name, theta, inputs, batch_dim)
    ops = graph.get_operations()[num_setup_ops:]
    purity.check(p.name, graph, ops)
    output_leaves = tf.nest.flatten(outputs)
    passed = tuple(_index_of(leaf, input_leaves) for leaf in output_leaves)
    used = tuple(bool(t is not None and t.consumers()) for t in input_leaves)
    variables = layer.vars.Flatten()
    return LayerTrace(
      kind=p.cls.__name__,
      num_params=sum(v.shape.num_elements() for v in variables if v.trainable),
      param_bytes=sum(v.shape.num_elements() * v.dtype.size for v in variables),
      trained_bytes=sum(map(memory.size, trained)),
      weights=tuple(
        Weight(_own_name(v, p.name), tuple(v.shape), v.dtype.base_dtype.name)
        for v in variables
        if v.trainable and v.dtype.is_floating
      ),
      fprop_flops=_fprop_flops(p, args, graph, ops, outputs),
      backward=backward.trace(
        graph, trained, rng, input_leaves, output_leaves, tape
      ),
      used_inputs=used,
      outputs=tf.nest.map_structure(_spec, outputs),
      passed_inputs=passed,
    )


def _call_symbolically(layer, name, theta, inputs, batch_dim):
  """Calls FProp on placeholders; explains what goes wrong.

  Returns:
    (outputs, the placeholders that randomness depends on).
  """
  scalar = tf.TensorSpec([], tf.int64)
  batch_sizes = [
    t.shape[batch_dim]
    for t in tf.nest.flatten(inputs)
    if t is not None and t.shape.rank > batch_dim
  ]
  if not batch_sizes:
    raise errors.UserError(
      f'Layer "{name}" gets no tensor that has dimension batch_dim={batch_dim}.'
    )
  micro_batch = randomness.MicroBatch(
    step=_placeholder(scalar),
    first_example=_placeholder(scalar),
    num_examples=batch_sizes[0],
    batch_dim=batch_dim,
  )
  seed = _placeholder(scalar)
  rng = [micro_batch.step, micro_batch.first_example, seed]
  try:
    return call.fprop(layer, name, theta, inputs, seed, micro_batch), rng
  except errors.UserError:
    raise
  except (ValueError, TypeError, AssertionError, AttributeError) as error:
    shapes = ', '.join(
      'None' if t is None else f'{t.dtype.name}{t.shape.as_list()}'
      for t in tf.nest.flatten(inputs)
    )
    raise errors.UserError(
      f'Layer "{name}" ({type(layer).__name__}) does not accept inputs '
      f'({shapes}): {error}'
    ) from error


def _fprop_flops(p, args, graph, ops, outputs) -> int:
  """Returns what FPropMeta declares, or else what the graph holds.

  Raises:
    UserError: FPropMeta fails or declares nonsense.
  """

  def to_tshape(spec):
    return None if spec is None else tshape.Shape(spec.shape.as_list())

  where = f'FPropMeta of layer "{p.name}" ({p.cls.__name__})'
  try:
    meta = p.cls.FPropMeta(p, *tf.nest.map_structure(to_tshape, args))
    declared = float(meta.flops)
    shapes = [_as_list(shape) for shape in tf.nest.flatten(meta.out_shapes)]
  except NotImplementedError:
    return flops.count(graph, ops)
  except Exception as error:
    raise errors.UserError(f'{where} failed: {error!r}') from error
  if not 0 <= declared < math.inf:
    raise errors.UserError(
      f'{where} says flops={meta.flops}: a number from 0 on is needed.'
    )
  real = [_as_list(leaf) for leaf in tf.nest.flatten(outputs)]
  if shapes != real:
    raise errors.UserError(
      f'{where} says that the outputs have shapes {shapes}; FProp returns '
      f'{real}.'
    )
  return int(declared) or flops.count(graph, ops)


def _as_list(leaf):
  """Returns the shape of a tensor, or a tshape.Shape, as a list."""
  if leaf is None:
    return None
  if isinstance(leaf, tshape.Shape):
    return leaf.ToTensorShape().as_list()
  return leaf.shape.as_list()


def _own_name(variable, layer_name):
  path = f'/{variable.name}'.partition(f'/{layer_name}/')[2]
  return path.removesuffix(':0').removesuffix('/var')


def _differentiable(leaves):
  return [t for t in leaves if t is not None and t.dtype.is_floating]


def _placeholder(like: Any) -> tf.Tensor | None:
  if like is None:
    return None
  return tf.compat.v1.placeholder(like.dtype, like.shape)


def _spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
  return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _index_of(leaf: Any, leaves: list) -> int | None:
  matches = [j for j, other in enumerate(leaves) if other is leaf]
  return matches[0] if matches and leaf is not None else None
