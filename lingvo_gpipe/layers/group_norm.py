"""Group normalisation of images: no statistics to keep, so it can be cut out.

Batch normalisation would assign moving averages, which a pipeline refuses; this
has as many weights, two for each channel.
"""

import math

import tensorflow as tf
from lingvo.core import base_layer, py_utils


class GroupNorm(base_layer.BaseLayer):
  """Normalises groups of channels of an image together (arXiv 1803.08494).

  [batch, height, width, channels] -> the same shape. For the backward pass only
  the inputs are kept: mean and deviation become one scale and one bias for each
  channel of each image.
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('channels', 0, 'Size of the last dimension of the inputs.')
    p.Define(
      'group_size',
      16,
      'Upper bound for the channels of a group, which are as many as its '
      'greatest common divisor with `channels`. More of them steady the '
      'statistics of images of few pixels; a group of one channel would make '
      'an image of one pixel 0, whatever it was.',
    )
    p.Define('epsilon', 1e-5, 'Added to the variance, against division by 0.')
    return p

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    # One variable for what is added to a scale of 1 and for the bias: a cell
    # has many norms, and each variable takes time to trace.
    init = py_utils.WeightInit.Constant(0.0)
    self.CreateVariable(
      'scale_bias', py_utils.WeightParams([2, p.channels], init, p.dtype)
    )

  def FProp(self, theta, inputs):
    """Normalises `inputs` [batch, height, width, channels]."""
    p = self.params
    theta = self._CastToFPropDtype(theta)
    _, height, width, channels = inputs.shape
    group_size = math.gcd(p.group_size, channels)
    group_shape = [channels // group_size, group_size]
    grouped = tf.reshape(inputs, [-1, height * width, *group_shape])
    mean, variance = tf.nn.moments(grouped, [1, 3], keepdims=True)
    scale, bias = tf.unstack(tf.reshape(theta.scale_bias, [2, *group_shape]))
    scale = (1.0 + scale) * tf.math.rsqrt(variance + p.epsilon)
    normed = grouped * scale + (bias - mean * scale)
    return tf.reshape(normed, [-1, height, width, channels])
