"""Our own sequence layers."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import cluster_factory, tshape

from lingvo_gpipe import cost, layers

_DIM, _TIME, _BATCH = 32, 16, 4

_IDS = tf.TensorSpec([_BATCH, _TIME], tf.int32)
_WEIGHTS = tf.TensorSpec([_BATCH, _TIME], tf.float32)
_VECTORS = tf.TensorSpec([_BATCH, _TIME, _DIM], tf.float32)


def _block():
  return layers.TransformerBlock.Params().Set(
    name='block', model_dim=_DIM, hidden_dim=4 * _DIM, num_heads=4
  )


_CASES = {
  'embedding': (
    layers.TokenEmbedding.Params().Set(
      name='embedding', model_dim=_DIM, max_time=_TIME
    ),
    (_IDS,),
  ),
  'block': (_block(), (_VECTORS,)),
  'norm': (
    layers.LayerNorm.Params().Set(name='norm', input_dim=_DIM),
    (_VECTORS,),
  ),
  'softmax': (
    layers.SoftmaxCrossEntropy.Params().Set(name='softmax', input_dim=_DIM),
    (_VECTORS, _IDS, _WEIGHTS),
  ),
}


@pytest.mark.parametrize('case', _CASES)
def test_fprop_meta_agrees_with_the_trace(case, monkeypatch):
  p, args = _CASES[case]
  shapes = [tshape.Shape(a.shape.as_list()) for a in args]
  meta = p.cls.FPropMeta(p, *shapes)

  def undeclared(*unused):
    raise NotImplementedError

  monkeypatch.setattr(p.cls, 'FPropMeta', undeclared)
  trace = cost.trace_layer(p, args)
  assert tf.nest.map_structure(
    lambda s: s.ToTensorShape().as_list(), tuple(meta.out_shapes)
  ) == tf.nest.map_structure(lambda t: t.shape.as_list(), trace.outputs)
  # The trace does not count every cheap op; the products it does.
  counted = trace.fprop_flops
  if case in ('block', 'softmax'):
    assert counted == pytest.approx(int(meta.flops), rel=0.1)
  else:
    assert 0.3 * counted <= int(meta.flops) <= 3 * max(counted, 1)


def test_block_does_not_see_the_future():
  block = _block().Instantiate()
  x = np.random.RandomState(0).randn(_BATCH, _TIME, _DIM).astype('f')
  y = block.FPropDefaultTheta(tf.constant(x)).numpy()
  x[:, 9:] += 1
  changed = block.FPropDefaultTheta(tf.constant(x)).numpy()
  np.testing.assert_array_equal(changed[:, :9], y[:, :9])
  assert (changed[:, 9:] != y[:, 9:]).any()


def test_dropout_is_off_in_evaluation():
  p = _block().Set(residual_dropout_prob=0.5, atten_dropout_prob=0.5)
  block = p.Instantiate()
  x = tf.random.stateless_normal([_BATCH, _TIME, _DIM], [0, 1])
  with cluster_factory.SetEval(True):
    a, b = block.FPropDefaultTheta(x), block.FPropDefaultTheta(x)
  np.testing.assert_array_equal(a, b)


def test_heads_must_divide_the_dimension():
  with pytest.raises(ValueError, match='num_heads=5 does not divide'):
    _block().Set(num_heads=5).Instantiate()


def test_padding_does_not_count_in_the_loss():
  softmax = _CASES['softmax'][0].Copy().Set(bits_metric='bits').Instantiate()
  x = tf.random.stateless_normal([2, 3, _DIM], [0, 1])
  labels = tf.constant([[1, 2, 3], [4, 5, 6]])
  weights = tf.constant([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
  metrics = softmax.FPropDefaultTheta(x, labels, weights)
  logits = tf.reshape(x, [-1, _DIM]) @ softmax.theta.w + softmax.theta.b
  each = tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.reshape(labels, [-1]), logits
  ).numpy()
  assert metrics.loss[0].numpy() == pytest.approx(each[[0, 1, 3]].mean())
  assert metrics.loss[1].numpy() == 3
  assert metrics.bits[0].numpy() == pytest.approx(
    each[[0, 1, 3]].mean() / np.log(2)
  )


def test_a_batch_of_padding_has_loss_zero():
  softmax = _CASES['softmax'][0].Instantiate()
  zeros = tf.zeros([2, 3])
  metrics = softmax.FPropDefaultTheta(
    tf.zeros([2, 3, _DIM]), tf.cast(zeros, tf.int32), zeros
  )
  assert metrics.loss[0].numpy() == 0
