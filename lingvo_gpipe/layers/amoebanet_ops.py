"""What the cells of AmoebaNet-D are made of: convolutions and poolings.

All take and give images [batch, height, width, channels]; with a stride of 2
height and width are halved, rounded up.
"""

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe.layers import group_norm

# Kernels (height, width) of an operation, one convolution after the other.
_KERNELS = {
  'conv_1x1': ((1, 1),),
  'conv_3x3': ((1, 1), (3, 3), (1, 1)),
  'conv_1x7_7x1': ((1, 1), (1, 7), (7, 1), (1, 1)),
}
# Between the first and the last convolution there are so many times fewer
# channels.
_BOTTLENECK = 4


class _Normalised(base_layer.BaseLayer):
  """Ends in a group normalisation, the child `norm`."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('input_channels', 0, 'Channels of the inputs.')
    p.Define('channels', 0, 'Channels of the outputs; an even number.')
    return p

  def __init__(self, params):
    super().__init__(params)
    norm = group_norm.GroupNorm.Params()
    self.CreateChild('norm', norm.Set(channels=self.params.channels))


class ReluConvNorm(_Normalised):
  """ReLU, convolution without bias, group normalisation.

  [batch, height, width, input_channels] -> [batch, ..., channels]
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('kernel', (1, 1), 'Height and width of the window that is seen.')
    p.Define('strides', (1, 1), 'Steps of the window, down and to the right.')
    return p

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    shape = [*p.kernel, p.input_channels, p.channels]
    self.CreateVariable('w', _conv_weight(shape, p.dtype))

  def FProp(self, theta, inputs):
    """Applies the three to `inputs` [batch, height, width, input_channels]."""
    theta = self._CastToFPropDtype(theta)
    x = tf.nn.relu(inputs)
    x = tf.nn.conv2d(x, theta.w, self.params.strides, 'SAME')
    return self.norm.FProp(theta.norm, x)


class FactorizedReduce(_Normalised):
  """Halves an image by two 1x1 convolutions, for even and for odd pixels.

  [batch, height, width, input_channels] -> ReLU
      -> even rows and columns -> channels / 2 --|
      -> odd rows and columns  -> channels / 2 --+-- concat -- norm
  """

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    shape = [1, 1, p.input_channels, p.channels // 2]
    for name in ('even', 'odd'):
      self.CreateVariable(name, _conv_weight(shape, p.dtype))

  def FProp(self, theta, inputs):
    """Halves `inputs` [batch, height, width, input_channels]."""
    theta = self._CastToFPropDtype(theta)
    x = tf.nn.relu(inputs)
    shifted = tf.pad(x[:, 1:, 1:], [[0, 0], [0, 1], [0, 1], [0, 0]])
    halves = [
      tf.nn.conv2d(x, theta.even, 2, 'SAME'),
      tf.nn.conv2d(shifted, theta.odd, 2, 'SAME'),
    ]
    return self.norm.FProp(theta.norm, tf.concat(halves, -1))


def convolutions(operation: str, channels: int, stride: int) -> list:
  """Returns Params of the layers that an operation runs one after the other.

  Args:
    operation: a name of the genotype; if no convolution, there are no layers.
    channels: of its inputs and outputs.
    stride: along each side of the kernels that see more than one pixel.
  """
  kernels = _KERNELS.get(operation, ())
  inner = channels // _BOTTLENECK
  sizes = [channels, *[inner] * (len(kernels) - 1), channels]
  return [
    ReluConvNorm.Params().Set(
      input_channels=sizes[j],
      channels=sizes[j + 1],
      kernel=kernel,
      strides=tuple(stride if side > 1 else 1 for side in kernel),
    )
    for j, kernel in enumerate(kernels)
  ]


def pool(operation: str, inputs: tf.Tensor, stride: int) -> tf.Tensor:
  """Runs an operation that has no weights; padding is left out of averages."""
  if operation == 'none':
    return inputs
  if operation == 'avg_pool_3x3':
    return tf.nn.avg_pool2d(inputs, 3, stride, 'SAME')
  size = {'max_pool_2x2': 2, 'max_pool_3x3': 3}[operation]
  return tf.nn.max_pool2d(inputs, size, stride, 'SAME')


def _conv_weight(shape, dtype):
  """Keeps the size of activations that pass a ReLU (arXiv 1502.01852)."""
  height, width, input_channels, _ = shape
  deviation = (2 / (height * width * input_channels)) ** 0.5
  init = py_utils.WeightInit.Gaussian(deviation)
  return py_utils.WeightParams(shape, init, dtype)
