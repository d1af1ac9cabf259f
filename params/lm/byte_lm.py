"""Transformer language models over bytes; they need no data but Python's own.

A model of your own in the same form: see README.md, "A model of your own".
"""

from lingvo import model_registry
from lingvo.core import base_model_params
from lingvo_gpipe.params import recipe

from lingvo_gpipe import layers, pipeline_task, pipelining_layer
from lingvo_gpipe.inputs import byte_text


class ByteLm(base_model_params.SingleTaskModelParams):
  """Embedding, blocks, norm, softmax; subclasses set the sizes."""

  NUM_BLOCKS = 0
  MODEL_DIM = 0
  NUM_HEADS = 4
  SEQUENCE_LENGTH = 0
  BATCH_SIZE = 32
  DROPOUT = 0.1
  LEARNING_RATE = 0.0
  NUM_STAGES = 4
  NUM_MICRO_BATCHES = 8

  def _Input(self):
    return byte_text.ByteTextInput.Params().Set(
      batch_size=self.BATCH_SIZE, sequence_length=self.SEQUENCE_LENGTH
    )

  def Train(self):
    return self._Input()

  def Dev(self):
    return self._Input().Set(held_out=True)

  def Task(self):
    dim = self.MODEL_DIM
    embedding = layers.TokenEmbedding.Params().Set(
      name='embedding',
      model_dim=dim,
      max_time=self.SEQUENCE_LENGTH,
      dropout_prob=self.DROPOUT,
    )
    block = layers.TransformerBlock.Params().Set(
      name='block',
      model_dim=dim,
      hidden_dim=4 * dim,
      num_heads=self.NUM_HEADS,
      atten_dropout_prob=self.DROPOUT,
      residual_dropout_prob=self.DROPOUT,
      relu_dropout_prob=self.DROPOUT,
    )
    norm = layers.LayerNorm.Params().Set(name='norm', input_dim=dim)
    loss = layers.SoftmaxCrossEntropy.Params().Set(
      name='softmax', input_dim=dim, bits_metric='bits_per_byte'
    )
    p = pipeline_task.PipelineTask.Params().Set(name='byte_lm')
    p.pipeline = pipelining_layer.PipeliningLayer.Params().Set(
      name='pipeline',
      layer_tpl=[embedding, *[block] * self.NUM_BLOCKS, norm],
      loss_tpl=loss,
      num_stages=self.NUM_STAGES,
      num_micro_batches=self.NUM_MICRO_BATCHES,
    )
    recipe.set_up(p, self.LEARNING_RATE)
    return p


@model_registry.RegisterSingleTaskModel
class Tiny(ByteLm):
  """8 blocks of 128 dimensions on 128 bytes: minutes on two cores."""

  NUM_BLOCKS = 8
  MODEL_DIM = 128
  SEQUENCE_LENGTH = 128
  LEARNING_RATE = 3e-3


@model_registry.RegisterSingleTaskModel
class Small(ByteLm):
  """16 blocks of 256 dimensions on 256 bytes: an hour or so on two cores."""

  NUM_BLOCKS = 16
  MODEL_DIM = 256
  SEQUENCE_LENGTH = 256
  LEARNING_RATE = 1e-3
