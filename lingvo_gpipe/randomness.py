"""Randomness that belongs to the example, not to the device.

A dropout mask is a pure function of (seed, path of the layer, global step,
index of the example in the mini-batch). How the mini-batch is cut into
micro-batches, where the layer runs and whether it runs once or twice
(rematerialisation) changes nothing:

    mini-batch of 6    e0 e1 e2 e3 e4 e5      one Philox stream per dropout
    M = 2             [e0 e1 e2][e3 e4 e5]    and step; each example owns a
    M = 3             [e0 e1][e2 e3][e4 e5]   fixed range of its counter, so a
                                              micro-batch jumps to its place

Lingvo's layers draw through `py_utils.GenerateStepSeedPair` and
`py_utils.DeterministicDropout`. Both are looked up when called, so `scope`
replaces them while a layer's FProp is traced.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import errors, random_bits

_VALUE_RANGE = 1 << 16


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """Which examples a layer is looking at, and when.

  Attributes:
    step: int64 scalar, the global step.
    first_example: int64 scalar, index in the mini-batch of its first example.
    num_examples: how many examples it holds.
    batch_dim: the dimension of activations that counts examples.
    bits: where random bits come from: "philox", TensorFlow's own generator, or
      "hash", which gives the same inside XLA.
  """

  step: tf.Tensor
  first_example: tf.Tensor
  num_examples: int
  batch_dim: int = 0
  bits: str = 'philox'


def layer_seed(seed: int | None, path: str) -> int:
  """Returns the 62-bit seed of the layer called `path`."""
  digest = hashlib.md5(f'{seed or 0}/{path}'.encode()).digest()
  return int.from_bytes(digest[:8], 'little') >> 2


@contextlib.contextmanager
def scope(
  layer: str, seed: tf.Tensor, micro_batch: MicroBatch
) -> Iterator[None]:
  """While open, Lingvo's deterministic dropout follows the example.

  Args:
    layer: the layer's name, for error messages.
    seed: int64 scalar from `layer_seed`.
    micro_batch: the examples at hand.

  Raises:
    UserError: a layer drops out a tensor without a dimension of examples.
  """
  draw_number = itertools.count()

  def step_seed_pair(p, op_seed=None):
    del p  # p.random_seed is part of `seed` already.
    draw_seed = seed + next(draw_number)
    if op_seed is not None:
      draw_seed += tf.cast(op_seed, tf.int64)
    return tf.stack([draw_seed, micro_batch.step])

  def deterministic_dropout(x, keep_prob, seeds, noise_shape=None, name=None):
    with tf.name_scope(name or 'dropout'):
      shape = [int(d) for d in (noise_shape or x.shape.as_list())]
      return _dropout(layer, x, keep_prob, seeds, shape, micro_batch)

  saved = py_utils.GenerateStepSeedPair, py_utils.DeterministicDropout
  py_utils.GenerateStepSeedPair = step_seed_pair
  py_utils.DeterministicDropout = deterministic_dropout
  try:
    yield
  finally:
    py_utils.GenerateStepSeedPair, py_utils.DeterministicDropout = saved


def _dropout(layer, x, keep_prob, seeds, mask_shape, micro_batch):
  """Zeroes elements of `x` with probability 1 - keep_prob, scales the rest."""
  threshold = round(float(keep_prob) * _VALUE_RANGE)
  if threshold >= _VALUE_RANGE:
    return x
  batch_dim = micro_batch.batch_dim
  values = _example_values(layer, seeds, mask_shape, micro_batch)
  keep = tf.cast(values < tf.constant(threshold, tf.uint16), x.dtype)
  scale = tf.cast(_VALUE_RANGE / threshold, x.dtype)
  if batch_dim:
    order = list(range(1, batch_dim + 1)) + [0]
    keep = tf.transpose(keep, order + list(range(batch_dim + 1, keep.ndim)))
  return x * (keep * scale)


def _example_values(
  layer: str,
  seeds: tf.Tensor,
  shape: Sequence[int],
  micro_batch: MicroBatch,
) -> tf.Tensor:
  """Returns uint16 [examples, other dims...], each example its own values."""
  batch_dim = micro_batch.batch_dim
  num_examples = micro_batch.num_examples
  if batch_dim >= len(shape) or shape[batch_dim] != num_examples:
    raise errors.UserError(
      f'Layer "{layer}" applies dropout to a tensor of shape {list(shape)}, '
      f'whose dimension {batch_dim} does not count the '
      f'{micro_batch.num_examples} examples of a micro-batch, so its mask '
      'cannot follow the example. Set batch_dim of the PipeliningLayer to the '
      'batch dimension, or use a batch-major layer.'
    )
  other_dims = list(shape[:batch_dim]) + list(shape[batch_dim + 1 :])
  per_example = math.prod(other_dims)
  words = random_bits.words(
    micro_batch.bits,
    seeds,
    micro_batch.first_example,
    num_examples,
    -(-per_example // 2),
  )
  values = tf.reshape(tf.bitcast(words, tf.uint16), [num_examples, -1])
  return tf.reshape(values[:, :per_example], [num_examples] + other_dims)
