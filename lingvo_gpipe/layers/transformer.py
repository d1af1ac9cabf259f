"""A causal Transformer block with layer normalisation before each part.

    x --+-- norm -- attention -- dropout --(+)--+-- norm -- feed-forward --(+)--
        |___________________________________|   |___________________________|

Written in plain 2-D matrix products. Lingvo's own TransformerLayer may stand in
a pipeline as well; its einsums and nested functions take longer to trace and to
run on CPUs.
"""

import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from lingvo_gpipe.layers import layer_norm

_SOFTMAX_FLOPS_PER_LOGIT = 5
# Added to the logits of the future; exp() of it is 0 in every float type.
_MASKED_LOGIT = -1e9


class TransformerBlock(base_layer.BaseLayer):
  """Pre-norm block (arXiv 1706.03762, 2002.04745): [B, T, D] -> [B, T, D]."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('model_dim', 0, 'Size of the last dimension of inputs (D).')
    p.Define('hidden_dim', 0, 'Inner size of the feed-forward part (F).')
    p.Define('num_heads', 1, 'Attention heads (H); they divide model_dim.')
    p.Define(
      'atten_dropout_prob', 0.0, 'Dropout on the attention probabilities.'
    )
    p.Define(
      'residual_dropout_prob',
      0.0,
      'Dropout on what attention and feed-forward add to the residual.',
    )
    p.Define('relu_dropout_prob', 0.0, 'Dropout inside the feed-forward part.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    if not p.num_heads or p.model_dim % p.num_heads:
      raise ValueError(
        f'{p.name}: num_heads={p.num_heads} does not divide '
        f'model_dim={p.model_dim}'
      )
    norm = layer_norm.LayerNorm.Params().Set(input_dim=p.model_dim)
    self.CreateChild('atten_norm', norm)
    self.CreateChild('ff_norm', norm)
    for name, prob in (
      ('atten_dropout', p.atten_dropout_prob),
      ('residual_dropout', p.residual_dropout_prob),
      ('relu_dropout', p.relu_dropout_prob),
    ):
      dropout = layers.DeterministicDropoutLayer.Params()
      self.CreateChild(name, dropout.Set(keep_prob=1.0 - prob))

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    for name, shape in (
      ('qkv', [p.model_dim, 3 * p.model_dim]),
      ('post', [p.model_dim, p.model_dim]),
      ('ff_in', [p.model_dim, p.hidden_dim]),
      ('ff_out', [p.hidden_dim, p.model_dim]),
    ):
      init = py_utils.WeightInit.Gaussian(shape[0] ** -0.5)
      self.CreateVariable(name, py_utils.WeightParams(shape, init, p.dtype))
    for name, size in (('ff_in_b', p.hidden_dim), ('ff_out_b', p.model_dim)):
      init = py_utils.WeightInit.Constant(0.0)
      self.CreateVariable(name, py_utils.WeightParams([size], init, p.dtype))

  def FProp(self, theta, inputs):
    """Applies the block to `inputs` [batch, time, model_dim]."""
    theta = self._CastToFPropDtype(theta)

    def residual_dropout(x):
      return self.residual_dropout.FProp(theta.residual_dropout, x)

    normed = self.atten_norm.FProp(theta.atten_norm, inputs)
    x = inputs + residual_dropout(self._Attention(theta, normed))
    normed = self.ff_norm.FProp(theta.ff_norm, x)
    return x + residual_dropout(self._FeedForward(theta, normed))

  def _Attention(self, theta, inputs):
    """Each position attends to itself and to those before it."""
    p = self.params
    _, time, dim = inputs.shape
    head_dim = dim // p.num_heads
    qkv = tf.matmul(tf.reshape(inputs, [-1, dim]), theta.qkv)
    query, key, value = [
      tf.transpose(
        tf.reshape(part, [-1, time, p.num_heads, head_dim]), [0, 2, 1, 3]
      )
      for part in tf.split(qkv, 3, -1)
    ]
    logits = tf.matmul(query * head_dim**-0.5, key, transpose_b=True)
    future = 1.0 - tf.linalg.band_part(tf.ones([time, time]), -1, 0)
    logits += tf.cast(future * _MASKED_LOGIT, logits.dtype)
    probs = tf.nn.softmax(logits)
    probs = self.atten_dropout.FProp(theta.atten_dropout, probs)
    context = tf.transpose(tf.matmul(probs, value), [0, 2, 1, 3])
    projected = tf.matmul(tf.reshape(context, [-1, dim]), theta.post)
    return tf.reshape(projected, [-1, time, dim])

  def _FeedForward(self, theta, inputs):
    _, time, dim = inputs.shape
    flat = tf.reshape(inputs, [-1, dim])
    hidden = tf.nn.relu(tf.matmul(flat, theta.ff_in) + theta.ff_in_b)
    # Dropout needs to see the examples: [batch, time, hidden_dim].
    hidden = tf.reshape(hidden, [-1, time, self.params.hidden_dim])
    hidden = self.relu_dropout.FProp(theta.relu_dropout, hidden)
    hidden = tf.reshape(hidden, [-1, self.params.hidden_dim])
    outputs = tf.matmul(hidden, theta.ff_out) + theta.ff_out_b
    return tf.reshape(outputs, [-1, time, dim])

  @classmethod
  def FPropMeta(cls, p, inputs):
    py_utils.CheckShapes((inputs,))
    batch, time, dim = inputs[0], inputs[1], inputs[2]
    tokens = batch * time
    # Query, key, value and output projections; two feed-forward products.
    products = 2 * tokens * dim * (4 * dim + 2 * p.hidden_dim)
    attention = (
      batch * time * time * (4 * dim + _SOFTMAX_FLOPS_PER_LOGIT * p.num_heads)
    )
    # Two norms, two residuals, biases, activation.
    elementwise = tokens * (2 * 10 * dim + 3 * dim + 2 * p.hidden_dim)
    return py_utils.NestedMap(
      flops=products + attention + elementwise, out_shapes=(inputs,)
    )
