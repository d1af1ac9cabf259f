"""What inputs share: which files, which of them held out, in which order.

All of it is a pure function of names, seed and position in training.
"""

import glob
import os

import tensorflow as tf
from lingvo.core import datasource

# Every so-and-so-many-th file is held out for evaluation.
HELD_OUT_EVERY = 20


class GeneratorSource(datasource.TFDatasetSource):
  """Hands Lingvo the dataset of its input generator's `MakeDataset`."""

  def GetDataset(self):
    return self._input_generator.MakeDataset()


def shuffle(positions: tf.Tensor, size: int, seed: int) -> tf.Tensor:
  """Maps positions to examples: in each epoch another permutation of all.

  Args:
    positions: int64 from 0 on, a scalar or [number of positions].
    size: number of examples.
    seed: another order for each.

  Returns:
    int64 of the same shape, each below `size`.
  """
  epochs = positions // size
  seeds = tf.fill(tf.shape(epochs), tf.constant(seed, tf.int64))
  return tf.raw_ops.RandomIndexShuffle(
    index=positions % size,
    seed=tf.stack([seeds, epochs, 0 * epochs], -1),
    max_index=tf.constant(size - 1, tf.int64),
  )


def is_held_out(j: int, size: int) -> bool:
  """Returns whether file j of `size` is kept for evaluation: one at least."""
  every = min(HELD_OUT_EVERY, size)
  return j % every == every - 1


def matching(file_pattern: str) -> set[str]:
  """Returns the files that any of the glob patterns matches.

  Args:
    file_pattern: patterns separated by commas.
  """
  return {
    path
    for pattern in file_pattern.split(',')
    for path in glob.iglob(os.path.expanduser(pattern), recursive=True)
    if os.path.isfile(path)
  }
