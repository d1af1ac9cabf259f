"""The Transformer language models of GPipe's table 1b (arXiv 1811.06965).

Blocks of 12 * 2048^2 weights between two tables of 32,000 vectors, one for the
tokens that come in and one for those that are predicted:

    Transformer-L    parameters      accelerators
    3                282.2M          1
    13               785.8M          1
    103              5.3B            8
    415              21.0B           32
    1663             83.9B           128

The tokens are bytes, of which there are 256; the tables have the paper's size.
"""

from lingvo import model_registry
from lingvo_gpipe.params.lm import byte_lm


class GpipeTransformer(byte_lm.ByteLm):
  """A ByteLm whose positions have no weights; subclasses set the depth."""

  MODEL_DIM = 2048
  NUM_HEADS = 32
  SEQUENCE_LENGTH = 1024
  VOCAB_SIZE = 32_000
  BATCH_SIZE = 32
  DROPOUT = 0.0
  LEARNING_RATE = 2e-4
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 32

  def Task(self):
    p = super().Task().Set(name='gpipe_transformer')
    embedding = p.pipeline.layer_tpl[0]
    embedding.Set(vocab_size=self.VOCAB_SIZE, positions='sinusoid')
    p.pipeline.loss_tpl.num_classes = self.VOCAB_SIZE
    return p


@model_registry.RegisterSingleTaskModel
class Transformer3(GpipeTransformer):
  """282M parameters: what one accelerator of 8 GB could train."""

  NUM_BLOCKS = 3


@model_registry.RegisterSingleTaskModel
class Transformer13(GpipeTransformer):
  """786M parameters: one accelerator, with rematerialisation."""

  NUM_BLOCKS = 13


@model_registry.RegisterSingleTaskModel
class Transformer103(GpipeTransformer):
  """5.3B parameters on 8 accelerators."""

  NUM_BLOCKS = 103
  NUM_STAGES = 8


@model_registry.RegisterSingleTaskModel
class Transformer415(GpipeTransformer):
  """21.0B parameters on 32 accelerators."""

  NUM_BLOCKS = 415
  NUM_STAGES = 32


@model_registry.RegisterSingleTaskModel
class Transformer1663(GpipeTransformer):
  """83.9B parameters on 128 accelerators."""

  NUM_BLOCKS = 1663
  NUM_STAGES = 128


@model_registry.RegisterSingleTaskModel
class TransformerMini(GpipeTransformer):
  """4 blocks of 64 dimensions on 64 bytes: the same, on two cores."""

  NUM_BLOCKS = 4
  MODEL_DIM = 64
  NUM_HEADS = 4
  SEQUENCE_LENGTH = 64
  VOCAB_SIZE = 256
  LEARNING_RATE = 3e-3
  NUM_STAGES = 2
  NUM_MICRO_BATCHES = 4
