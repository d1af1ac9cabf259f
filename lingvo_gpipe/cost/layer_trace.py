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
from concurrent import futures
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, cluster_factory, tshape

from lingvo_gpipe import errors, randomness
from lingvo_gpipe.cost import flops, purity
from lingvo_gpipe.layers import call


@dataclasses.dataclass(frozen=True)
class LayerTrace:
  """What tracing one layer found.

  "Leaves" are the tensors of a nested structure in `tf.nest.flatten` order.

  Attributes:
    kind: the layer's class name.
    num_params: number of trainable weights.
    param_bytes: bytes of all its variables.
    fprop_flops: FLOPs of one FProp on the traced shapes.
    used_inputs: for each input leaf, whether the layer computes with it.
    outputs: structure (a tuple) of the outputs, `tf.TensorSpec`s and Nones.
    passed_inputs: for each output leaf, the index of the input leaf that it
      hands on untouched, or None if the layer made it.
  """

  kind: str
  num_params: int
  param_bytes: int
  fprop_flops: int
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
  # Lingvo takes any layer built during another's __init__, on the same thread,
  # for its child.
  with futures.ThreadPoolExecutor(max_workers=1) as thread:
    return thread.submit(
      _trace, cluster_factory.Current(), p, args, batch_dim
    ).result()


def _trace(cluster, p, args, batch_dim) -> LayerTrace:
  with cluster, tf.Graph().as_default() as graph:
    layer = p.Instantiate()
    theta = layer.theta.Transform(_placeholder)
    inputs = tf.nest.map_structure(_placeholder, args)
    num_setup_ops = len(graph.get_operations())
    outputs = _call_symbolically(layer, p.name, theta, inputs, batch_dim)
    ops = graph.get_operations()[num_setup_ops:]
    purity.check(p.name, graph, ops)

    input_leaves = tf.nest.flatten(inputs)
    output_leaves = tf.nest.flatten(outputs)
    passed = tuple(_index_of(leaf, input_leaves) for leaf in output_leaves)
    used = tuple(bool(t is not None and t.consumers()) for t in input_leaves)
    variables = layer.vars.Flatten()
    return LayerTrace(
      kind=p.cls.__name__,
      num_params=sum(v.shape.num_elements() for v in variables if v.trainable),
      param_bytes=sum(v.shape.num_elements() * v.dtype.size for v in variables),
      fprop_flops=_declared_flops(p, args) or flops.count(graph, ops),
      used_inputs=used,
      outputs=tf.nest.map_structure(_spec, outputs),
      passed_inputs=passed,
    )


def _call_symbolically(layer, name, theta, inputs, batch_dim):
  """Calls FProp on placeholders; explains what goes wrong."""
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
  try:
    return call.fprop(
      layer, name, theta, inputs, _placeholder(scalar), micro_batch
    )
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


def _declared_flops(p, args) -> int | None:
  """Returns the FLOPs that the layer's FPropMeta declares, if it has one."""

  def to_tshape(spec):
    return None if spec is None else tshape.Shape(spec.shape.as_list())

  try:
    meta = p.cls.FPropMeta(p, *tf.nest.map_structure(to_tshape, args))
    return int(meta.flops)
  except NotImplementedError:
    return None
  except Exception as error:
    raise errors.UserError(
      f'FPropMeta of layer "{p.name}" ({p.cls.__name__}) failed: {error!r}'
    ) from error


def _placeholder(like: Any) -> tf.Tensor | None:
  if like is None:
    return None
  return tf.compat.v1.placeholder(like.dtype, like.shape)


def _spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
  return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _index_of(leaf: Any, leaves: list) -> int | None:
  matches = [j for j, other in enumerate(leaves) if other is leaf]
  return matches[0] if matches and leaf is not None else None
