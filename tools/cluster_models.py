"""The workloads of bench_cluster.py."""

from lingvo import model_registry
from lingvo_gpipe.params.lm import byte_lm


@model_registry.RegisterSingleTaskModel
class Wide(byte_lm.ByteLm):
  """8 blocks of 512 dimensions on 128 bytes."""

  NUM_BLOCKS = 8
  MODEL_DIM = 512
  NUM_HEADS = 8
  SEQUENCE_LENGTH = 128
  LEARNING_RATE = 1e-3


@model_registry.RegisterSingleTaskModel
class Narrow(byte_lm.ByteLm):
  """16 blocks of 128 dimensions on 64 bytes."""

  NUM_BLOCKS = 16
  MODEL_DIM = 128
  NUM_HEADS = 8
  SEQUENCE_LENGTH = 64
  BATCH_SIZE = 64
  LEARNING_RATE = 1e-3
