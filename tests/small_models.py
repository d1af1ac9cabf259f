"""Models small enough for a test; also importable by the trainer binary."""

from lingvo import model_registry
from lingvo.core import base_model_params, py_utils
from lingvo_gpipe.params.lm import byte_lm

from lingvo_gpipe import layers


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


class NllSoftmax(layers.SoftmaxCrossEntropy):
  """Calls its loss by another name."""

  def FProp(self, theta, inputs, labels, weights):
    return _with_nll(super().FProp(theta, inputs, labels, weights))

  @classmethod
  def FPropMeta(cls, p, inputs, labels, weights):
    meta = super().FPropMeta(p, inputs, labels, weights)
    [metrics] = meta.out_shapes
    return py_utils.NestedMap(
      flops=meta.flops, out_shapes=(_with_nll(metrics),)
    )


def _with_nll(metrics):
  return py_utils.NestedMap(
    {'nll' if name == 'loss' else name: m for name, m in metrics.items()}
  )


@model_registry.RegisterSingleTaskModel
class Renamed(Micro):
  """Minimises a metric that is not called loss."""

  def Task(self):
    p = super().Task()
    p.pipeline.loss_tpl.cls = NllSoftmax
    p.pipeline.loss_name = 'nll'
    return p
