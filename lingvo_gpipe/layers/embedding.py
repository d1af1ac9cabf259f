"""Embeddings of tokens (or bytes) and of their positions."""

import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape


class TokenEmbedding(base_layer.BaseLayer):
  """Looks up each token and adds a learned vector for its position.

  ids [batch, time] -> table[ids] * sqrt(model_dim) + positions[time]
                    -> dropout -> [batch, time, model_dim]
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('vocab_size', 256, 'Number of different tokens; 256 for bytes.')
    p.Define('model_dim', 0, 'Size of the vector that stands for a token.')
    p.Define('max_time', 0, 'Longest sequence, in tokens.')
    p.Define(
      'dropout_prob', 0.0, 'Share of the elements set to zero in training.'
    )
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
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
    self.CreateVariable(
      'positions',
      py_utils.WeightParams(
        [p.max_time, p.model_dim], py_utils.WeightInit.Gaussian(0.02), p.dtype
      ),
    )

  def FProp(self, theta, ids):
    """Embeds tokens.

    Args:
      theta: the values of `table` and `positions`.
      ids: int [batch, time], each below vocab_size.

    Returns:
      [batch, time, model_dim], of the layer's dtype.
    """
    theta = self._CastToFPropDtype(theta)
    vectors = tf.gather(theta.table, ids) * self.params.model_dim**0.5
    vectors += theta.positions[: ids.shape[1]]
    return self.dropout.FProp(theta.dropout, vectors)

  @classmethod
  def FPropMeta(cls, p, ids):
    py_utils.CheckShapes((ids,))
    out_shape = tshape.Shape(ids[:] + [p.model_dim])
    # A scale and an addition for each element.
    return py_utils.NestedMap(
      flops=2 * out_shape.num_elements(), out_shapes=(out_shape,)
    )
