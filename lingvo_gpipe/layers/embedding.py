"""Embeddings of tokens (or bytes) and of their positions."""

import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape

from lingvo_gpipe import errors


class TokenEmbedding(base_layer.BaseLayer):
  """Looks up each token and adds a vector for its position.

  ids [batch, time] -> table[ids] * sqrt(model_dim) + positions[time]
                    -> dropout -> [batch, time, model_dim]
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('vocab_size', 256, 'Number of different tokens; 256 for bytes.')
    p.Define('model_dim', 0, 'Size of the vector that stands for a token.')
    p.Define(
      'max_time',
      0,
      'Longest sequence, in tokens: so many positions are learned. Sinusoids '
      'have no limit.',
    )
    p.Define(
      'positions',
      'learned',
      'What stands for a position: "learned" is a vector of weights for each, '
      '"sinusoid" needs none: sines and cosines of wavelengths from 2 pi to '
      '20,000 pi (arXiv 1706.03762, section 3.5), model_dim must be even.',
    )
    p.Define(
      'dropout_prob', 0.0, 'Share of the elements set to zero in training.'
    )
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    if p.positions not in ('learned', 'sinusoid'):
      raise errors.UserError(
        f'{p.name}: positions="{p.positions}" is neither "learned" nor '
        '"sinusoid".'
      )
    if p.positions == 'sinusoid' and p.model_dim % 2:
      raise errors.UserError(
        f'{p.name}: positions="sinusoid" needs an even model_dim, not '
        f'{p.model_dim}.'
      )
    self.CreateChild(
      'dropout',
      layers.DeterministicDropoutLayer.Params().Set(
        keep_prob=1.0 - p.dropout_prob
      ),
    )

  def _CreateLayerVariables(self):
    super()._CreateLayerVariables()
    p = self.params
    # The lookup is scaled by sqrt(model_dim), so elements start near 1.
    init = py_utils.WeightInit.Gaussian(p.model_dim**-0.5)
    self.CreateVariable(
      'table',
      py_utils.WeightParams([p.vocab_size, p.model_dim], init, p.dtype),
    )
    if p.positions == 'learned':
      init = py_utils.WeightInit.Gaussian(0.02)
      self.CreateVariable(
        'positions',
        py_utils.WeightParams([p.max_time, p.model_dim], init, p.dtype),
      )

  def FProp(self, theta, ids):
    """Embeds tokens.

    Args:
      theta: the values of `table` and, if learned, of `positions`.
      ids: int [batch, time], each below vocab_size.

    Returns:
      [batch, time, model_dim], of the layer's dtype.
    """
    p = self.params
    theta = self._CastToFPropDtype(theta)
    vectors = tf.gather(theta.table, ids) * p.model_dim**0.5
    time = ids.shape[1]
    if p.positions == 'learned':
      vectors += theta.positions[:time]
    else:
      vectors += tf.cast(_sinusoids(time, p.model_dim), vectors.dtype)
    return self.dropout.FProp(theta.dropout, vectors)

  @classmethod
  def FPropMeta(cls, p, ids):
    py_utils.CheckShapes((ids,))
    out_shape = tshape.Shape(ids[:] + [p.model_dim])
    # A scale and an addition for each element.
    return py_utils.NestedMap(
      flops=2 * out_shape.num_elements(), out_shapes=(out_shape,)
    )


def _sinusoids(time: int, dim: int) -> tf.Tensor:
  """Returns [time, dim]: sin and cos, in turn, of each of dim / 2 angles."""
  exponents = tf.range(0, dim, 2, tf.float32) / dim
  angles = tf.range(time, dtype=tf.float32)[:, None] / 10_000**exponents
  pairs = tf.stack([tf.sin(angles), tf.cos(angles)], -1)
  return tf.reshape(pairs, [time, dim])
