"""Models small enough for a test; also importable by the trainer binary."""

from lingvo import model_registry
from lingvo.core import base_model_params
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


class _NamedLoss(layers.SoftmaxCrossEntropy):
  """Calls its loss `nll`."""

  def FProp(self, theta, inputs, labels, weights):
    metrics = super().FProp(theta, inputs, labels, weights)
    metrics.nll = metrics.pop('loss')
    return metrics

  @classmethod
  def FPropMeta(cls, p, inputs, labels, weights):
    raise NotImplementedError


@model_registry.RegisterSingleTaskModel
class Named(Micro):
  """Minimises a metric that is not called `loss`."""

  def Task(self):
    p = super().Task()
    loss = _NamedLoss.Params().Set(name='softmax', input_dim=self.MODEL_DIM)
    return p.Set(pipeline=p.pipeline.Set(loss_tpl=loss, loss_name='nll'))
