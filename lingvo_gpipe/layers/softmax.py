"""The loss of a language model: projection to the vocabulary, cross-entropy."""

import math

import tensorflow as tf
from lingvo.core import base_layer, py_utils, tshape

_SOFTMAX_FLOPS_PER_LOGIT = 5


class SoftmaxCrossEntropy(base_layer.BaseLayer):
  """Scores the next token and compares it with the label.

  inputs [batch, time, input_dim] -> logits [batch, time, num_classes]
  labels, weights [batch, time]   -> metrics, each (average, weight)
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last dimension of the inputs.')
    p.Define('num_classes', 256, 'Number of different labels; 256 for bytes.')
    p.Define(
      'like_table',
      False,
      'Whether w is [num_classes, input_dim], so that tied_weights can make it '
      "the table of an embedding; its init is the table's then.",
    )
    p.Define(
      'bits_metric',
      '',
      'If set, the cross-entropy is also reported in bits under this name, for '
      'example "bits_per_byte" where a token is a byte.',
    )
    return p

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    init = py_utils.WeightInit.Gaussian(p.input_dim**-0.5)
    shape = [p.input_dim, p.num_classes]
    if p.like_table:
      shape.reverse()
    self.CreateVariable('w', py_utils.WeightParams(shape, init, p.dtype))
    self.CreateVariable(
      'b',
      py_utils.WeightParams(
        [p.num_classes], py_utils.WeightInit.Constant(0.0), p.dtype
      ),
    )

  def FProp(self, theta, inputs, labels, weights):
    """Computes the metrics of a (micro-)batch.

    Args:
      theta: the values of `w` and `b`.
      inputs: [batch, time, input_dim].
      labels: int [batch, time], each below num_classes.
      weights: float [batch, time]; 0 leaves a token out of the loss.

    Returns:
      A NestedMap of metrics, each (average, weight), float32 scalars:
      `loss` in nats per token, `accuracy`, and the loss in bits if asked for.
      The weight is the sum of `weights`.
    """
    p = self.params
    theta = self._CastToFPropDtype(theta)
    flat = tf.reshape(inputs, [-1, p.input_dim])
    logits = tf.matmul(flat, theta.w, transpose_b=p.like_table) + theta.b
    logits = tf.cast(logits, tf.float32)
    labels = tf.reshape(labels, [-1])
    weights = tf.cast(tf.reshape(weights, [-1]), tf.float32)
    total_weight = tf.reduce_sum(weights)

    def average(per_token):
      return tf.math.divide_no_nan(
        tf.reduce_sum(per_token * weights), total_weight
      )

    loss = average(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    correct = tf.argmax(logits, -1, labels.dtype) == labels
    metrics = py_utils.NestedMap(
      loss=(loss, total_weight),
      accuracy=(average(tf.cast(correct, tf.float32)), total_weight),
    )
    if p.bits_metric:
      bits = tf.stop_gradient(loss) / math.log(2)
      metrics[p.bits_metric] = (bits, total_weight)
    return metrics

  @classmethod
  def FPropMeta(cls, p, inputs, labels, weights):
    py_utils.CheckShapes((inputs, labels, weights))
    logits = inputs[:-1].num_elements() * p.num_classes
    scalar = tshape.Shape([])
    metrics = ['loss', 'accuracy'] + ([p.bits_metric] if p.bits_metric else [])
    return py_utils.NestedMap(
      flops=logits * (2 * p.input_dim + _SOFTMAX_FLOPS_PER_LOGIT),
      out_shapes=(py_utils.NestedMap({m: (scalar, scalar) for m in metrics}),),
    )
