"""Sequence layers for a pipeline's list; any Lingvo layer may stand beside."""

from lingvo_gpipe.layers.embedding import TokenEmbedding
from lingvo_gpipe.layers.layer_norm import LayerNorm
from lingvo_gpipe.layers.softmax import SoftmaxCrossEntropy
from lingvo_gpipe.layers.transformer import TransformerBlock

__all__ = [
  'LayerNorm',
  'SoftmaxCrossEntropy',
  'TokenEmbedding',
  'TransformerBlock',
]
