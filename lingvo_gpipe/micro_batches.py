"""Splits a mini-batch into micro-batches and joins what comes of them.

32 examples, M = 3:          [11][11][10]      no batch size is too odd
32 examples, R = 3, M = 2:   [6 5][6 5][5 5]   each replica splits its share
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import errors


def shares(p, batch_size: int) -> tuple[int, ...]:
  """Returns the number of examples of each replica, the largest first.

  Args:
    p: Params with num_replicas.
    batch_size: examples in the mini-batch.

  Raises:
    UserError: there would be a replica without examples.
  """
  return even_sizes(batch_size, p.num_replicas, 'num_replicas')


def sizes(p, share: int) -> tuple[int, ...]:
  """Returns the number of examples in each micro-batch, the largest first.

  Args:
    p: Params with num_micro_batches and micro_batch_size.
    share: examples of a replica; without replicas, of the mini-batch.

  Raises:
    UserError: there would be a micro-batch without examples.
  """
  if p.micro_batch_size:
    full, rest = divmod(share, p.micro_batch_size)
    return (p.micro_batch_size,) * full + ((rest,) if rest else ())
  whole = 'a mini-batch' if p.num_replicas == 1 else "a replica's share"
  return even_sizes(share, p.num_micro_batches, whole=whole)


def even_sizes(
  batch_size: int,
  count: int,
  field: str = 'num_micro_batches',
  whole: str = 'a mini-batch',
) -> tuple[int, ...]:
  """Returns sizes of `count` parts of a batch, the largest first.

  Args:
    batch_size: examples to divide.
    count: of parts.
    field: that says how many parts, for the error.
    whole: what is divided, for the error.

  Raises:
    UserError: there would be a part without examples.
  """
  if count > batch_size:
    raise errors.UserError(
      f'{field}={count}, but {whole} has only {batch_size} examples: set '
      f'{field} to {batch_size} or less, or enlarge the batch.'
    )
  size, larger = divmod(batch_size, count)
  return (size + 1,) * larger + (size,) * (count - larger)


def batch_size(specs: Any, batch_dim: int) -> int:
  """Returns the number of examples that a structure of specs or tensors holds.

  Raises:
    UserError: no tensor has the dimension, or its size is not fixed.
  """
  for leaf in tf.nest.flatten(specs):
    if leaf is not None and leaf.shape.rank > batch_dim:
      if leaf.shape[batch_dim] is None:
        raise errors.UserError(
          f'The batch size must be fixed, but dimension {batch_dim} of '
          f'{leaf.shape} is not: batch with drop_remainder=True.'
        )
      return leaf.shape[batch_dim]
  raise errors.UserError(f'No input has a dimension batch_dim={batch_dim}.')


def with_batch_size(
  spec: tf.TensorSpec | None, batch_dim: int, size: int
) -> tf.TensorSpec | None:
  """Returns `spec` with another number of examples."""
  if spec is None or spec.shape.rank <= batch_dim:
    return spec
  shape = spec.shape.as_list()
  shape[batch_dim] = size
  return tf.TensorSpec(shape, spec.dtype)


def split(tensor: Any, sizes: Sequence[int], batch_dim: int) -> list[tf.Tensor]:
  """Slices along the batch; a tensor without one goes whole to everyone."""
  tensor = tf.convert_to_tensor(tensor)
  if tensor.shape.rank <= batch_dim:
    return [tensor] * len(sizes)
  return tf.split(tensor, sizes, axis=batch_dim)


def join(parts: Sequence[Any], batch_dim: int) -> tf.Tensor | None:
  """Joins the outputs of micro-batches along the batch.

  Raises:
    UserError: the outputs have no batch dimension.
  """
  if parts[0] is None:
    return None
  if parts[0].shape.rank <= batch_dim:
    raise errors.UserError(
      f'An output of shape {parts[0].shape} has no batch dimension '
      f'{batch_dim}, so those of micro-batches cannot be joined: compute '
      'averages in loss_tpl.'
    )
  return tf.concat(parts, axis=batch_dim)
