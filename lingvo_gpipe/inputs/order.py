"""Orders of examples that are pure functions of the position in training."""

import tensorflow as tf
from lingvo.core import datasource


class GeneratorSource(datasource.TFDatasetSource):
  """Hands Lingvo the dataset of its input generator's `MakeDataset`."""

  def GetDataset(self):
    return self._input_generator.MakeDataset()


def shuffle(position: tf.Tensor, size: int, seed: int) -> tf.Tensor:
  """Maps a position to an example: in each epoch another permutation of all.

  Args:
    position: int64 scalar from 0 on.
    size: number of examples.
    seed: another order for each.

  Returns:
    int64 scalar below `size`.
  """
  epoch = position // size
  return tf.raw_ops.RandomIndexShuffle(
    index=position % size,
    seed=tf.stack([tf.constant(seed, tf.int64), epoch, 0 * epoch]),
    max_index=tf.constant(size - 1, tf.int64),
  )
