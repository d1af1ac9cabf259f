"""AmoebaNet-D (L, D), the image classifiers of GPipe's table 1a.

    images - stem - reduction x 2 - normal x L/3 - reduction - normal x L/3
           - reduction - normal x L/3 - classifier

The stem has D/4 channels; every reduction doubles the channels inside the cells
after it. With 1000 classes (arXiv 1811.06965):

    (L, D)       parameters      accelerators
    (18, 208)    82M             1
    (18, 416)    318M            1
    (18, 544)    542M            2
    (36, 544)    1.05B           4
    (72, 512)    1.8B            8

Images are generated, unless you tell where some are:
`--model_params_override='input.file_pattern:/data/*/*.jpg'`.
"""

from lingvo import model_registry
from lingvo.core import base_model_params
from lingvo_gpipe.params import recipe

from lingvo_gpipe import pipeline_task, pipelining_layer
from lingvo_gpipe.inputs import images
from lingvo_gpipe.layers import amoebanet


@model_registry.RegisterSingleTaskModel
class AmoebaNetD(base_model_params.SingleTaskModelParams):
  """The (18, 208) of the paper; subclasses set other sizes."""

  NUM_LAYERS = 18
  NUM_FILTERS = 208
  IMAGE_SIZE = 224
  NUM_CLASSES = 1000
  BATCH_SIZE = 128
  LEARNING_RATE = 1e-3
  NUM_STAGES = 1
  NUM_MICRO_BATCHES = 32

  def _Input(self):
    return images.ImageInput.Params().Set(
      batch_size=self.BATCH_SIZE,
      image_size=self.IMAGE_SIZE,
      num_classes=self.NUM_CLASSES,
    )

  def Train(self):
    return self._Input()

  def Dev(self):
    return self._Input().Set(held_out=True)

  def Task(self):
    layers = _layers(self.NUM_LAYERS, self.NUM_FILTERS)
    loss = amoebanet.Classifier.Params().Set(
      name='classifier',
      input_dim=amoebanet.Cell.output_channels(layers[-1]),
      num_classes=self.NUM_CLASSES,
    )
    p = pipeline_task.PipelineTask.Params().Set(
      name='amoebanet_d',
      input_keys=['image'],
      target_keys=['label', 'weight'],
    )
    p.pipeline = pipelining_layer.PipeliningLayer.Params().Set(
      name='pipeline',
      layer_tpl=layers,
      loss_tpl=loss,
      num_stages=self.NUM_STAGES,
      num_micro_batches=self.NUM_MICRO_BATCHES,
    )
    recipe.set_up(p, self.LEARNING_RATE)
    return p


def _layers(num_layers: int, num_filters: int) -> list:
  """Returns the stem and the cells of AmoebaNet-D (num_layers, num_filters).

  Cells that are equal are one Params object, repeated.
  """
  channels = num_filters // 4
  layers = [amoebanet.Stem.Params().Set(name='stem', channels=channels)]
  prev = prev_prev = channels
  after_reduction = False

  def add(name, reduction):
    nonlocal prev, prev_prev, after_reduction
    cell = amoebanet.Cell.Params().Set(
      name=name,
      prev_channels=prev,
      prev_prev_channels=prev_prev,
      channels=channels,
      reduction=reduction,
      after_reduction=after_reduction,
    )
    layers.append(layers[-1] if cell == layers[-1] else cell)
    prev, prev_prev = amoebanet.Cell.output_channels(cell), prev
    after_reduction = reduction

  for name, num_normal in (
    ('stem_reduction', 0),
    ('stem_reduction', num_layers // 3),
    ('reduction', num_layers // 3),
    ('reduction', num_layers // 3),
  ):
    channels *= 2
    add(name, reduction=True)
    for _ in range(num_normal):
      add('normal', reduction=False)
  return layers


@model_registry.RegisterSingleTaskModel
class AmoebaNetD18x208(AmoebaNetD):
  """82M parameters: what one accelerator of 8 GB could train."""


@model_registry.RegisterSingleTaskModel
class AmoebaNetD18x416(AmoebaNetD):
  """319M parameters: one accelerator, with rematerialisation."""

  NUM_FILTERS = 416


@model_registry.RegisterSingleTaskModel
class AmoebaNetD18x544(AmoebaNetD):
  """543M parameters on 2 accelerators."""

  NUM_FILTERS = 544
  NUM_STAGES = 2


@model_registry.RegisterSingleTaskModel
class AmoebaNetD36x544(AmoebaNetD):
  """1.06B parameters on 4 accelerators."""

  NUM_LAYERS = 36
  NUM_FILTERS = 544
  NUM_STAGES = 4


@model_registry.RegisterSingleTaskModel
class AmoebaNetD72x512(AmoebaNetD):
  """1.84B parameters on 8 accelerators."""

  NUM_LAYERS = 72
  NUM_FILTERS = 512
  NUM_STAGES = 8


@model_registry.RegisterSingleTaskModel
class AmoebaNetDMini(AmoebaNetD):
  """(3, 32) on images of 32 pixels, of 10 classes: minutes on two cores."""

  NUM_LAYERS = 3
  NUM_FILTERS = 32
  IMAGE_SIZE = 32
  NUM_CLASSES = 10
  BATCH_SIZE = 16
  NUM_STAGES = 2
  NUM_MICRO_BATCHES = 4
