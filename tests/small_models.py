"""Models small enough for a test; also importable by the trainer binary."""

from lingvo import model_registry
from lingvo.core import base_model_params
from lingvo_gpipe.params.lm import byte_lm


@model_registry.RegisterSingleTaskModel
class Micro(byte_lm.ByteLm):
  """6 blocks of 16 dimensions on 16 bytes."""

  NUM_BLOCKS = 6
  MODEL_DIM = 16
  NUM_HEADS = 2
  SEQUENCE_LENGTH = 16
  BATCH_SIZE = 32
  LEARNING_RATE = 1e-2


@model_registry.RegisterSingleTaskModel
class Other(Micro):
  """Of another size, so that its checkpoints do not fit Micro."""

  MODEL_DIM = 8


@model_registry.RegisterSingleTaskModel
class NoInput(base_model_params.SingleTaskModelParams):
  """Has a task alone."""

  def Task(self):
    return Micro().Task()
