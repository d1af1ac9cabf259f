"""Random bits that are a pure function of (seed, step, example, position).

Philox is TensorFlow's own kernel, on CPUs and GPUs. XLA lays its Philox stream
out otherwise, and not so that an example's part could be found; the hash is
made of integer operations alone, and gives the same bits everywhere.
"""

import tensorflow as tf

NAMES = ('philox', 'hash')

_PHILOX = 1  # tf.random.Algorithm.PHILOX.value
# A Philox counter yields four 32-bit words.
_WORDS_PER_COUNTER = 4


def words(
  bits: str,
  seeds: tf.Tensor,
  first_example: tf.Tensor,
  num_examples: int,
  per_example: int,
) -> tf.Tensor:
  """Returns uint32 [num_examples, at least per_example].

  Args:
    bits: one of NAMES.
    seeds: int64 [2]: a seed and the step.
    first_example: int64 scalar, index of the first example.
    num_examples: how many examples.
    per_example: words for each.
  """
  make = _hash if bits == 'hash' else _philox
  return make(seeds, first_example, num_examples, per_example)


def _philox(seeds, first_example, num_examples, per_example):
  counters = -(-per_example // _WORDS_PER_COUNTER)
  start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seeds)
  jump = tf.cast(first_example, tf.uint64) * tf.constant(counters, tf.uint64)
  return tf.raw_ops.StatelessRandomUniformFullIntV2(
    shape=[num_examples, counters * _WORDS_PER_COUNTER],
    key=start.key,
    counter=start.counter + tf.stack([jump, tf.zeros([], tf.uint64)]),
    alg=_PHILOX,
    dtype=tf.uint32,
  )


def _hash(seeds, first_example, num_examples, per_example):
  low = tf.cast(tf.bitwise.bitwise_and(seeds, 0xFFFFFFFF), tf.uint32)
  high = tf.cast(tf.bitwise.right_shift(seeds, 32), tf.uint32)
  key = tf.zeros([], tf.uint32)
  for part in (low[0], high[0], low[1]):
    key = _mix(tf.bitwise.bitwise_xor(key, part) + 1)
  examples = tf.cast(first_example, tf.uint32) + _range(num_examples)
  examples = _mix(tf.bitwise.bitwise_xor(_mix(examples), key))
  positions = _mix(_range(per_example))
  return _mix(tf.bitwise.bitwise_xor(examples[:, None], positions[None]))


def _range(count):
  return tf.cast(tf.range(1, count + 1), tf.uint32)


def _mix(x):
  """Returns a permutation of 32-bit words in which every bit moves every other.

  The constants are those of "lowbias32", found by search for the least bias
  (Wellons, "Prospecting for hash functions", 2018).
  """
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
    shifted = tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32))
    x = tf.bitwise.bitwise_xor(x, shifted)
    if factor != 1:
      x = x * tf.constant(factor, tf.uint32)
  return x
