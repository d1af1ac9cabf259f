"""Layer normalisation: Lingvo's, set up for use inside a stage."""

from lingvo.core import layers


class LayerNorm(layers.LayerNorm):
  """Normalises the last dimension of [..., input_dim] (arXiv 1607.06450)."""

  @classmethod
  def Params(cls):
    p = super().Params()
    # A stage is one function already; another inside it would only cost time.
    p.use_defun = False
    p.direct_scale = True
    return p

  def FProp(self, theta, inputs):
    """Normalises `inputs`; Lingvo's own would leave theta in its own dtype."""
    return super().FProp(self._CastToFPropDtype(theta), inputs)
