"""The hash: the same bits for an example however a batch is cut, and fair."""

import numpy as np
import tensorflow as tf

from lingvo_gpipe import random_bits

_SEEDS = tf.constant([0x123456789ABC, 7], tf.int64)


def _words(first, count, per_example=64, seeds=_SEEDS):
  first = tf.constant(first, tf.int64)
  return random_bits.words('hash', seeds, first, count, per_example).numpy()


def test_parts_are_those_of_the_whole():
  whole = _words(0, 12)
  np.testing.assert_array_equal(whole[5:9], _words(5, 4))


def test_xla_gives_the_same_bits():
  compiled = tf.function(
    lambda first: random_bits.words('hash', _SEEDS, first, 4, 64),
    jit_compile=True,
  )
  np.testing.assert_array_equal(
    compiled(tf.constant(5, tf.int64)), _words(5, 4)
  )


def test_bits_are_fair_and_independent():
  words = _words(0, 256, 1024)
  bits = np.unpackbits(words.view(np.uint8).reshape(256, -1), axis=1)
  # 8 million fair bits: a share this far from half is 6 standard deviations.
  assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size)
  signs = bits.astype(np.float32) * 2 - 1
  limit = 6 / np.sqrt(signs.size)
  for other in (
    np.roll(signs, 1, 0),  # The next example.
    np.roll(signs, 32, 1),  # The next word.
    np.unpackbits(
      _words(0, 256, 1024, _SEEDS + [0, 1]).view(np.uint8).reshape(256, -1),
      axis=1,
    ).astype(np.float32)
    * 2
    - 1,  # The next step.
  ):
    assert abs((signs * other).mean()) < limit


def test_seeds_and_steps_differ():
  several = [
    _words(0, 4),
    _words(0, 4, seeds=_SEEDS + [1, 0]),
    _words(0, 4, seeds=_SEEDS + [1 << 40, 0]),
    _words(0, 4, seeds=_SEEDS + [0, 1]),
  ]
  assert len({words.tobytes() for words in several}) == 4
