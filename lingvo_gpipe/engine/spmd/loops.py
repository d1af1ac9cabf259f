"""Rolled loops, and rows of tensors read and written inside them.

A program of loops has one size, however often they turn.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

# The kernels that XLA makes slices of, at places known only when it runs; this
# also loads them.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops


def loop(count, body: Callable, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
  """Runs `values = body(i, *values)` for i from 0 to count - 1.

  Args:
    count: a number or a scalar tensor; each core may have its own in a region.
    body: returns tensors like `values`.
    values: what goes around.
  """

  def turn(i, *now):
    after = body(i, *now)
    for new, old in zip(after, now, strict=True):
      new.set_shape(old.shape)
    return (i + 1, *after)

  start = tf.constant(0)
  _, *last = tf.while_loop(
    lambda i, *_: i < count, turn, (start, *values), parallel_iterations=1
  )
  return last


def take(tensor: tf.Tensor, *indices: tf.Tensor) -> tf.Tensor:
  """Returns tensor[indices]; an index out of range is moved into it."""
  rest = tensor.shape[len(indices) :]
  row = gen_xla_ops.xla_dynamic_slice(
    input=tensor,
    start_indices=_start(tensor, indices),
    size_indices=tf.constant([1] * len(indices) + rest.as_list()),
  )
  return tf.reshape(row, rest)


def put(tensor: tf.Tensor, value: tf.Tensor, *indices: tf.Tensor) -> tf.Tensor:
  """Returns the tensor with value at [indices], written where it is."""
  written = gen_xla_ops.xla_dynamic_update_slice(
    input=tensor,
    update=tf.reshape(value, [1] * len(indices) + value.shape.as_list()),
    indices=_start(tensor, indices),
  )
  written.set_shape(tensor.shape)
  return written


def put_if(
  condition: tf.Tensor, tensor: tf.Tensor, value: tf.Tensor, *indices: tf.Tensor
) -> tf.Tensor:
  """Returns `put`, or the tensor as it was."""
  kept = take(tensor, *indices)
  return put(tensor, tf.where(condition, value, kept), *indices)


def _start(tensor, indices):
  zeros = [0] * (tensor.shape.rank - len(indices))
  return tf.stack([*indices, *zeros])


def halves(tensors: Sequence) -> tuple[list, list]:
  """Returns the first and the second half of what goes around a loop."""
  middle = len(tensors) // 2
  return list(tensors[:middle]), list(tensors[middle:])
