"""What tracing a layer finds, and what it refuses."""

import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from lingvo_gpipe import cost, errors

_X = tf.TensorSpec([4, 8], tf.float32)


class _Layer(base_layer.BaseLayer):
  """A layer with one weight, whose FProp a test supplies."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('fprop', None, 'A function of (layer, theta, *args).')
    p.name = 'odd'
    return p

  def _CreateLayerVariables(self):
    self.CreateVariable(
      'w', py_utils.WeightParams([8, 8], py_utils.WeightInit.Constant(1.0))
    )

  def FProp(self, theta, *args):
    return self.params.fprop(self, theta, *args)


def _trace(fprop, *args):
  return cost.trace_layer(_Layer.Params().Set(fprop=fprop), args or (_X,))


def test_counts_parameters_bytes_and_flops():
  trace = _trace(lambda layer, theta, x: tf.matmul(x, theta.w))
  assert trace.num_params == 64
  assert trace.param_bytes == 256
  assert trace.fprop_flops == 2 * 4 * 8 * 8
  assert trace.outputs == (_X,)


def test_counts_einsum():
  trace = _trace(lambda layer, theta, x: tf.einsum('...d,df->...f', x, theta.w))
  assert trace.fprop_flops == 2 * 4 * 8 * 8


def test_follows_tensors_through_the_layer():
  skip = tf.TensorSpec([4], tf.int32)
  trace = _trace(
    lambda layer, theta, x, skip, none: (skip, x @ theta.w, none),
    _X,
    skip,
    None,
  )
  assert trace.used_inputs == (True, False, False)
  assert trace.passed_inputs == (1, None, None)
  assert trace.outputs == (skip, _X, None)


def test_a_giant_is_traced_without_allocating_it():
  class Giant(_Layer):
    def _CreateLayerVariables(self):
      self.CreateVariable('w', py_utils.WeightParams([1 << 20, 1 << 20]))

  trace = cost.trace_layer(
    Giant.Params().Set(fprop=lambda layer, theta, x: x), (_X,)
  )
  assert trace.num_params == 1 << 40


@pytest.mark.parametrize(
  'fprop, message',
  [
    (lambda layer, theta, x: tf.nn.dropout(x, 0.5), 'DeterministicDropout'),
    (lambda layer, theta, x: x + tf.random.normal([8]), 'DeterministicDropout'),
    (lambda layer, theta, x: x @ layer.vars.w, 'theta argument'),
    (
      lambda layer, theta, x: tf.function(lambda x: tf.nn.dropout(x, 0.5))(x),
      'DeterministicDropout',
    ),
  ],
)
def test_refuses_what_cannot_be_recomputed(fprop, message):
  with pytest.raises(errors.UserError, match=f'"odd".*{message}'):
    _trace(fprop)


def test_refuses_assignments():
  def fprop(layer, theta, x):
    with tf.control_dependencies([layer.vars.w.assign_add(tf.ones([8, 8]))]):
      return tf.identity(x)

  with pytest.raises(errors.UserError, match='"odd".*assigns to a variable'):
    _trace(fprop)


def test_refuses_lingvos_batch_norm_and_plain_dropout():
  projection = layers.ProjectionLayer.Params().Set(
    name='fc', input_dim=8, output_dim=8, batch_norm=True
  )
  with pytest.raises(errors.UserError, match='"fc".*batch_norm=False'):
    cost.trace_layer(projection, (_X,))
  dropout = layers.DropoutLayer.Params().Set(name='drop', keep_prob=0.5)
  with pytest.raises(errors.UserError, match='"drop".*DeterministicDropout'):
    cost.trace_layer(dropout, (_X,))


def test_wrong_inputs_name_the_layer_and_the_shapes():
  with pytest.raises(errors.UserError, match=r'"odd".*float32\[4, 7\]'):
    _trace(
      lambda layer, theta, x: tf.matmul(x, theta.w),
      tf.TensorSpec([4, 7], tf.float32),
    )


def test_a_broken_fprop_meta_is_named():
  class Broken(_Layer):
    @classmethod
    def FPropMeta(cls, p, x):
      return py_utils.NestedMap(flops=x.missing)

  p = Broken.Params().Set(fprop=lambda layer, theta, x: x)
  with pytest.raises(errors.UserError, match='FPropMeta of layer "odd"'):
    cost.trace_layer(p, (_X,))
