"""Lingvo's own layers stand in a pipeline like ours."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import (
  base_layer,
  batch_major_attention,
  layers,
  py_utils,
  rnn_cell,
  rnn_layers,
)

from lingvo_gpipe import pipelining_layer

_B, _T, _D = 6, 5, 8


class MeanSquare(base_layer.BaseLayer):
  """Mean over examples of the mean square of the first output."""

  def FProp(self, theta, x, *unused):
    return py_utils.NestedMap(
      loss=(tf.reduce_mean(tf.square(x)), tf.constant(float(x.shape[0])))
    )


class TimeMajor(base_layer.BaseLayer):
  """Lets a time-major layer [T, B, D] stand among batch-major ones."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('body', None, 'Params of the time-major layer.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('body', self.params.body)

  def FProp(self, theta, x):
    x = tf.transpose(x, [1, 0, 2])
    y, _ = self.body.FProp(theta.body, x, tf.zeros([_T, x.shape[1], 1]))
    return tf.transpose(y, [1, 0, 2])


def _projection():
  return layers.ProjectionLayer.Params().Set(
    name='layer',
    input_dim=_D,
    output_dim=_D,
    activation='TANH',
    has_bias=True,
    batch_norm=False,
  )


def _deterministic_dropout():
  return layers.DeterministicDropoutLayer.Params().Set(
    name='layer', keep_prob=0.7
  )


def _feed_forward():
  return layers.FeedForwardNet.Params().Set(
    name='layer',
    input_dim=_D,
    hidden_layer_dims=[2 * _D, _D],
    activation=['RELU', 'NONE'],
    dropout=layers.DeterministicDropoutLayer.Params().Set(keep_prob=0.8),
  )


def _conv():
  return layers.Conv2DLayerNoPadding.Params().Set(
    name='layer', filter_shape=(3, 3, 2, 2), filter_stride=(1, 1)
  )


def _transformer():
  p = batch_major_attention.GPipeBatchMajorTransformerLayer.Params()
  p.Set(name='layer', input_dim=_D, has_aux_atten=False)
  deterministic = layers.DeterministicDropoutLayer.Params()
  p.tr_atten_tpl.Set(
    input_dim=_D,
    num_heads=2,
    residual_dropout_prob=0.2,
    atten_dropout_prob=0.2,
    dropout_tpl=deterministic,
  )
  p.tr_atten_tpl.atten_tpl.dropout_tpl = deterministic
  p.tr_fflayer_tpl.Set(
    input_dim=_D,
    hidden_dim=2 * _D,
    residual_dropout_prob=0.2,
    relu_dropout_prob=0.2,
    residual_dropout_tpl=deterministic,
  )
  p.tr_fflayer_tpl.fflayer_tpl.dropout = deterministic
  return p


def _lstm():
  cell = rnn_cell.LSTMCellSimple.Params().Set(
    num_input_nodes=_D, num_output_nodes=_D
  )
  frnn = rnn_layers.FRNN.Params().Set(name='rnn', cell=cell)
  return TimeMajor.Params().Set(name='layer', body=frnn)


_VECTORS = [_B, _T, _D]
_CASES = {
  'ProjectionLayer': (_projection, lambda x: (x,), _VECTORS),
  'DeterministicDropoutLayer': (
    _deterministic_dropout,
    lambda x: (x,),
    _VECTORS,
  ),
  'FeedForwardNet': (_feed_forward, lambda x: (x,), _VECTORS),
  'Conv2DLayerNoPadding': (_conv, lambda x: (x,), [_B, 4, 4, 2]),
  'BatchMajorTransformer': (
    _transformer,
    lambda x: (x, tf.zeros([_B, _T]), None, None, None, None, None),
    _VECTORS,
  ),
  'LSTM': (_lstm, lambda x: (x,), _VECTORS),
}


def _run(make, arguments, x, num_stages, num_micro_batches, remat):
  pipeline = (
    pipelining_layer.PipeliningLayer.Params()
    .Set(
      name='pipe',
      random_seed=4,
      layer_tpl=[make() for _ in range(3)],
      loss_tpl=MeanSquare.Params().Set(name='loss'),
      num_stages=num_stages,
      num_micro_batches=num_micro_batches,
      remat=remat,
    )
    .Instantiate()
  )

  @tf.function(autograph=False)
  def step():
    return pipeline.ForwardBackward(pipeline.theta, arguments(x))

  metrics, gradients = step()
  return metrics.loss[0].numpy(), [
    g.numpy() for g in gradients.Flatten() if g is not None
  ]


@pytest.mark.parametrize('case', _CASES)
def test_layer_is_the_same_in_every_pipeline(case):
  make, arguments, shape = _CASES[case]
  x = tf.random.stateless_normal(shape, [3, 4])
  one = _run(make, arguments, x, 1, 2, 'none')
  for num_stages, remat in ((3, 'full'), (2, 'except_last')):
    other = _run(make, arguments, x, num_stages, 2, remat)
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
      np.testing.assert_array_equal(a, b)
  whole = _run(make, arguments, x, 1, 1, 'none')
  np.testing.assert_allclose(one[0], whole[0], rtol=1e-5)
  for a, b in zip(one[1], whole[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
