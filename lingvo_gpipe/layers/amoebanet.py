"""AmoebaNet-D (arXiv 1802.01548) cell by cell, for a pipeline's list.

A cell takes what the two cells before it made, so two images run down the list:

    images -- Stem --+-- prev ------ Cell --+-- new ------- Cell -- ...
                     |                |     |                |
                     +-- prev_prev ---+     +-- prev --------+

Inside a cell, prev and prev_prev become states 0 and 1 of `channels` channels;
each further state is the sum of two operations on states before it; some
states, side by side, are the output. The reduction cell halves the image where
operations take state 0 or 1:

    state   normal cell                       reduction cell
    2       conv_1x1(1) + max_pool_3x3(1)     max_pool_2x2(0) + max_pool_3x3(0)
    3       1 + conv_1x7_7x1(0)               2 + conv_3x3(1)
    4       conv_1x1(0) + conv_1x7_7x1(0)     conv_1x7_7x1(2) + max_pool_3x3(2)
    5       max_pool_3x3(2) + 2               3 + max_pool_2x2(1)
    6       avg_pool_3x3(1) + conv_1x1(5)     avg_pool_3x3(2) + conv_1x1(3)
    output  0, 3, 4, 6                        4, 5, 6

The normal cell's output is that of the authors' program (the paper says 4, 5,
6); GPipe's parameter counts are met with it.
"""

import tensorflow as tf
from lingvo.core import base_layer, py_utils, tshape

from lingvo_gpipe.layers import amoebanet_ops, softmax

# Two (operation, state it takes) for each of the states 2 to 6.
_NORMAL_STATES = (
  (('conv_1x1', 1), ('max_pool_3x3', 1)),
  (('none', 1), ('conv_1x7_7x1', 0)),
  (('conv_1x1', 0), ('conv_1x7_7x1', 0)),
  (('max_pool_3x3', 2), ('none', 2)),
  (('avg_pool_3x3', 1), ('conv_1x1', 5)),
)
_NORMAL_OUTPUT = (0, 3, 4, 6)
_REDUCTION_STATES = (
  (('max_pool_2x2', 0), ('max_pool_3x3', 0)),
  (('none', 2), ('conv_3x3', 1)),
  (('conv_1x7_7x1', 2), ('max_pool_3x3', 2)),
  (('none', 3), ('max_pool_2x2', 1)),
  (('avg_pool_3x3', 2), ('conv_1x1', 3)),
)
_REDUCTION_OUTPUT = (4, 5, 6)
# Mean, deviation from it, its square, its sum; scale and bias.
_NORM_FLOPS_PER_ELEMENT = 6


class Stem(amoebanet_ops.ReluConvNorm):
  """Makes the first two outputs of pixels; they are the same.

  images [batch, height, width, 3] -> twice [batch, height/2, width/2, channels]
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    return p.Set(input_channels=3, kernel=(3, 3), strides=(2, 2))

  def FProp(self, theta, images):
    """Returns (prev, prev_prev) for the first cell."""
    x = super().FProp(theta, self._CastToFPropDtype(images))
    return x, x

  @classmethod
  def FPropMeta(cls, p, images):
    py_utils.CheckShapes((images,))
    batch, height, width, _ = images
    out = tshape.Shape([batch, -(-height // 2), -(-width // 2), p.channels])
    per_output = 2 * 3 * 3 * p.input_channels + _NORM_FLOPS_PER_ELEMENT
    return py_utils.NestedMap(
      flops=images.num_elements() + out.num_elements() * per_output,
      out_shapes=(out, out),
    )


class Cell(base_layer.BaseLayer):
  """A normal or a reduction cell; the module's documentation draws both.

  prev [batch, height, width, prev_channels], prev_prev (the same size, or twice
  as large) -> new, prev. `new` has 4 * channels and the size of prev, or after
  a reduction 3 * channels and half the size.
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('prev_channels', 0, 'Channels that the cell before gives.')
    p.Define('prev_prev_channels', 0, 'Channels that the cell before it gives.')
    p.Define('channels', 0, 'Channels inside the cell; a multiple of 4.')
    p.Define('reduction', False, 'Whether the cell halves the image.')
    p.Define(
      'after_reduction',
      False,
      'Whether the cell before halves the image, so that prev_prev is twice as '
      'large as prev.',
    )
    return p

  @classmethod
  def output_channels(cls, p) -> int:
    """Returns the channels of `new`, given the cell's Params."""
    return p.channels * len(_genotype(p)[1])

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    self._states, self._output = _genotype(p)
    fit = amoebanet_ops.ReluConvNorm.Params().Set(channels=p.channels)
    self.CreateChild('fit_prev', fit.Copy().Set(input_channels=p.prev_channels))
    if p.after_reduction:
      fit = amoebanet_ops.FactorizedReduce.Params().Set(channels=p.channels)
    fit.input_channels = p.prev_prev_channels
    self.CreateChild('fit_prev_prev', fit)
    for state, pair in enumerate(self._states, 2):
      for side, (operation, source) in enumerate(pair):
        convolutions = amoebanet_ops.convolutions(
          operation, p.channels, self._stride(source)
        )
        if convolutions:
          self.CreateChildren(_name(state, side), convolutions)

  def FProp(self, theta, prev, prev_prev):
    """Applies the cell.

    Args:
      theta: the values of the weights.
      prev: [batch, height, width, prev_channels], of the cell before.
      prev_prev: [batch, ..., prev_prev_channels], of the cell before that one.

    Returns:
      (new, prev), what the next cell takes.
    """
    states = [
      self.fit_prev.FProp(theta.fit_prev, prev),
      self.fit_prev_prev.FProp(theta.fit_prev_prev, prev_prev),
    ]
    for state, pair in enumerate(self._states, 2):
      left, right = (
        self._apply(theta, _name(state, side), operation, source, states)
        for side, (operation, source) in enumerate(pair)
      )
      states.append(left + right)
    return tf.concat([states[j] for j in self._output], -1), prev

  def _apply(self, theta, name, operation, source, states):
    x = states[source]
    if name not in self.children:
      return amoebanet_ops.pool(operation, x, self._stride(source))
    for layer, weights in zip(self.children[name], theta[name], strict=True):
      x = layer.FProp(weights, x)
    return x

  def _stride(self, source) -> int:
    """States 0 and 1 of a reduction cell still have the size of prev."""
    return 2 if self.params.reduction and source < 2 else 1


class Classifier(softmax.SoftmaxCrossEntropy):
  """The loss of an image classifier: average over the image, then softmax.

  prev [batch, height, width, input_dim] -> logits [batch, num_classes]
  labels, weights [batch]                -> metrics, each (average, weight)
  """

  @classmethod
  def Params(cls):
    return super().Params().Set(num_classes=1000)

  def FProp(self, theta, prev, prev_prev, labels, weights):
    """Computes the metrics of a (micro-)batch.

    Args:
      theta: the values of `w` and `b`.
      prev: [batch, height, width, input_dim], of the last cell.
      prev_prev: of the cell before; not used.
      labels: int [batch], each below num_classes.
      weights: float [batch]; 0 leaves an image out of the loss.

    Returns:
      A NestedMap of metrics, each (average, weight), float32 scalars:
      `loss` in nats per image and `accuracy`.
    """
    del prev_prev
    return super().FProp(theta, tf.reduce_mean(prev, [1, 2]), labels, weights)

  @classmethod
  def FPropMeta(cls, p, prev, prev_prev, labels, weights):
    py_utils.CheckShapes((prev, prev_prev))
    pooled = tshape.Shape([prev[0], prev[-1]])
    meta = super().FPropMeta(p, pooled, labels, weights)
    meta.flops += prev.num_elements()
    return meta


def _genotype(p):
  """Returns (operations of the states from 2 on, states that are output)."""
  if p.reduction:
    return _REDUCTION_STATES, _REDUCTION_OUTPUT
  return _NORMAL_STATES, _NORMAL_OUTPUT


def _name(state, side) -> str:
  return f'state{state}_{"ab"[side]}'
