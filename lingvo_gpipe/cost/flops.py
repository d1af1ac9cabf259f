"""Counts the FLOPs of a graph, with TensorFlow's own statistics per op."""

import math
from collections.abc import Iterable

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops


def count(graph: tf.Graph, ops: Iterable[tf.Operation]) -> int:
  """Returns the FLOPs of `ops`; those without statistics count as nothing.

  Ops inside functions that `ops` call are not seen: layers built of loops
  (recurrent ones) should declare their FLOPs in FPropMeta.
  """
  return sum(_op_flops(graph, op) for op in ops)


def _op_flops(graph: tf.Graph, op: tf.Operation) -> int:
  if op.type == 'Einsum':
    return _einsum_flops(op)
  try:
    stats = tf_ops.get_stats_for_node_def(graph, op.node_def, 'flops')
  except ValueError:  # Shapes not fully known.
    return 0
  return int(stats.value or 0)


def _einsum_flops(op: tf.Operation) -> int:
  """A multiplication and an addition for each point of the index space."""
  sizes = {}
  terms = op.get_attr('equation').decode().split('->')[0].split(',')
  for term, operand in zip(terms, op.inputs, strict=True):
    dims = operand.shape.as_list()
    before, _, after = term.partition('...')
    num_dots = len(dims) - len(before) - len(after)
    # Dimensions under an ellipsis line up from the right.
    dots = [f'.{num_dots - j}' for j in range(num_dots)]
    sizes.update(zip([*before, *dots, *after], dims, strict=True))
  return 2 * math.prod(size or 1 for size in sizes.values())
