"""A dropout mask depends on the example and on nothing else."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils

from lingvo_gpipe import errors, randomness


def _drop(x, first=0, step=3, seed=5, batch_dim=0, keep_prob=0.8, **kwargs):
  micro_batch = randomness.MicroBatch(
    step=tf.constant(step, tf.int64),
    first_example=tf.constant(first, tf.int64),
    num_examples=x.shape[batch_dim],
    batch_dim=batch_dim,
  )
  seed = tf.constant(randomness.layer_seed(seed, 'layer'), tf.int64)
  with randomness.scope('layer', seed, micro_batch):
    seeds = py_utils.GenerateStepSeedPair(layers.DropoutLayer.Params())
    return py_utils.DeterministicDropout(x, keep_prob, seeds, **kwargs).numpy()


@pytest.mark.parametrize('dtype', [tf.float32, tf.bfloat16])
@pytest.mark.parametrize('shape', [[12, 5], [12, 3, 7], [12, 1], [12]])
def test_slices_of_a_batch_see_the_masks_of_the_whole(shape, dtype):
  x = tf.ones(shape, dtype)
  whole = _drop(x)
  for sizes in ([6, 6], [5, 4, 3], [1] * 12):
    starts = np.cumsum([0, *sizes])
    parts = [
      _drop(x[a:b], first=a) for a, b in zip(starts, starts[1:], strict=False)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_batch_in_the_second_dimension():
  x = tf.ones([7, 6, 4])
  whole = _drop(x, batch_dim=1)
  halves = [_drop(x[:, :3], 0, batch_dim=1), _drop(x[:, 3:], 3, batch_dim=1)]
  np.testing.assert_array_equal(np.concatenate(halves, 1), whole)
  batch_major = _drop(tf.transpose(x, [1, 0, 2]))
  np.testing.assert_array_equal(whole.transpose(1, 0, 2), batch_major)


@pytest.mark.parametrize('other', [{'step': 4}, {'seed': 6}, {'first': 1}])
def test_mask_changes_with_step_seed_and_example(other):
  x = tf.ones([8, 64])
  assert (_drop(x) != _drop(x, **other)).any()


def test_large_steps_have_masks_of_their_own():
  # Where seeds pass through bfloat16, thousands of steps share a mask.
  x = tf.ones([2, 64], tf.bfloat16)
  masks = {_drop(x, step=s).tobytes() for s in range(100_000, 100_064)}
  assert len(masks) == 64


def test_shares_and_scale():
  x = tf.ones([100, 1000])
  for keep_prob in (0.1, 0.5, 0.9):
    y = _drop(x, keep_prob=keep_prob)
    assert abs((y > 0).mean() - keep_prob) < 0.01
    assert abs(y.mean() - 1) < 0.02
  np.testing.assert_array_equal(_drop(x, keep_prob=1.0), x)


def test_noise_shape_is_shared_along_dimensions_of_one():
  y = _drop(tf.ones([4, 10, 20]), noise_shape=[4, 1, 20])
  assert (y == y[:, :1]).all()
  assert (y != y[:1]).any()


def test_masks_shared_by_examples_are_refused():
  with pytest.raises(errors.UserError, match='cannot follow the example'):
    _drop(tf.ones([4, 10, 20]), noise_shape=[1, 10, 20])


def test_tensor_without_examples_is_refused():
  micro_batch = randomness.MicroBatch(
    tf.constant(0, tf.int64), tf.constant(0, tf.int64), num_examples=4
  )
  with randomness.scope('late', tf.constant(1, tf.int64), micro_batch):
    seeds = py_utils.GenerateStepSeedPair(layers.DropoutLayer.Params())
    with pytest.raises(errors.UserError, match='"late".*batch_dim'):
      py_utils.DeterministicDropout(tf.ones([7, 4]), 0.5, seeds)


def test_lingvo_is_as_it_was_outside_a_scope():
  before = py_utils.DeterministicDropout, py_utils.GenerateStepSeedPair
  _drop(tf.ones([2, 2]))
  after = py_utils.DeterministicDropout, py_utils.GenerateStepSeedPair
  assert before == after
