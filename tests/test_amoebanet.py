"""AmoebaNet-D: its cells, and the models of GPipe's table 1a."""

import functools

import helpers
import pytest
import tensorflow as tf
from lingvo.core import tshape
from lingvo_gpipe.params.image import amoebanet as models

from lingvo_gpipe import cost
from lingvo_gpipe.layers import amoebanet, group_norm

_BATCH = 2


def _images(size, channels):
  return tf.TensorSpec([_BATCH, size, size, channels], tf.float32)


_STEM = amoebanet.Stem.Params().Set(name='stem', channels=8)
_CLASSIFIER = amoebanet.Classifier.Params().Set(
  name='classifier', input_dim=32, num_classes=10
)
_TARGETS = (
  tf.TensorSpec([_BATCH], tf.int32),
  tf.TensorSpec([_BATCH], tf.float32),
)


def _cell(reduction, after_reduction):
  return amoebanet.Cell.Params().Set(
    name='cell',
    prev_channels=24,
    prev_prev_channels=20,
    channels=16,
    reduction=reduction,
    after_reduction=after_reduction,
  )


def _shapes(trace):
  return [t.shape.as_list() for t in tf.nest.flatten(trace.outputs)]


@pytest.mark.parametrize('size', [12, 7])
def test_stem_halves_the_image(size):
  trace = cost.trace_layer(_STEM, (_images(size, 3),))
  half = (size + 1) // 2
  assert _shapes(trace) == [[_BATCH, half, half, 8]] * 2


@pytest.mark.parametrize('size', [6, 7, 1])
@pytest.mark.parametrize('reduction', [False, True])
@pytest.mark.parametrize('after_reduction', [False, True])
def test_cell_shapes(size, reduction, after_reduction):
  p = _cell(reduction, after_reduction)
  prev_prev = 2 * size if after_reduction else size
  trace = cost.trace_layer(p, (_images(size, 24), _images(prev_prev, 20)))
  new = (size + 1) // 2 if reduction else size
  channels = amoebanet.Cell.output_channels(p)
  assert channels == (48 if reduction else 64)
  assert _shapes(trace) == [
    [_BATCH, new, new, channels],
    [_BATCH, size, size, 24],
  ]
  # The next cell's prev_prev is handed on as it came.
  assert trace.passed_inputs == (None, 0)
  assert trace.used_inputs == (True, True)


@pytest.mark.parametrize('size', [5, 1])
@pytest.mark.parametrize('reduction', [False, True])
@pytest.mark.parametrize('after_reduction', [False, True])
def test_gradients_reach_all_weights(size, reduction, after_reduction):
  cell = _cell(reduction, after_reduction).Instantiate()
  prev = tf.random.stateless_normal([_BATCH, size, size, 24], [0, 1])
  if after_reduction:
    size *= 2
  prev_prev = tf.random.stateless_normal([_BATCH, size, size, 20], [0, 2])
  with tf.GradientTape() as tape:
    new, _ = cell.FPropDefaultTheta(prev, prev_prev)
    value = tf.reduce_sum(new * tf.random.stateless_normal(new.shape, [0, 3]))
  gradients = tape.gradient(value, cell.vars.Flatten())
  assert all(float(tf.norm(g)) > 0 for g in gradients)


def test_norm_makes_each_group_of_an_image_standard():
  norm = group_norm.GroupNorm.Params()
  norm = norm.Set(name='norm', channels=6, group_size=9).Instantiate()
  x = 3 + 5 * tf.random.stateless_normal([_BATCH, 4, 5, 6], [0, 1])
  y = norm.FPropDefaultTheta(x)
  groups = tf.reshape(y, [_BATCH, 4 * 5, 2, 3])
  mean, variance = tf.nn.moments(groups, [1, 3])
  assert mean.numpy() == pytest.approx(0, abs=1e-5)
  assert variance.numpy() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
  'p, args',
  [
    (_STEM, (_images(16, 3),)),
    (_CLASSIFIER, (_images(4, 32), _images(4, 32), *_TARGETS)),
  ],
)
def test_fprop_meta_agrees_with_the_trace(p, args, monkeypatch):
  meta = p.cls.FPropMeta(p, *[tshape.Shape(a.shape.as_list()) for a in args])

  def undeclared(*unused_args):
    raise NotImplementedError

  monkeypatch.setattr(p.cls, 'FPropMeta', undeclared)
  counted = cost.trace_layer(p, args).fprop_flops
  assert int(meta.flops) == pytest.approx(counted, rel=0.1)


def test_classifier_averages_over_the_image():
  classifier = _CLASSIFIER.Instantiate()
  x = tf.random.stateless_normal([_BATCH, 3, 3, 32], [0, 1])
  labels, weights = tf.constant([3, 4]), tf.constant([1.0, 0.0])
  metrics = classifier.FPropDefaultTheta(x, x, labels, weights)
  theta = classifier.theta
  logits = tf.reduce_mean(x, [1, 2]) @ theta.w + theta.b
  [loss, _] = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  assert metrics.loss[0].numpy() == pytest.approx(loss.numpy())
  assert metrics.loss[1].numpy() == 1
  assert sorted(metrics) == ['accuracy', 'loss']


@functools.cache
def _trace(text, args):
  """Traces equal layers once; `text` holds all of a layer's Params."""
  return cost.trace_layer(_PARAMS[text], args)


_PARAMS = {}


def _num_params(model):
  pipeline = model().Task().pipeline
  size = 32  # Weights do not depend on it.
  args = (_images(size, 3),)
  total = 0
  for p in [*pipeline.layer_tpl, pipeline.loss_tpl]:
    if p is pipeline.loss_tpl:
      args += _TARGETS
    _PARAMS[p.ToText()] = p
    trace = _trace(p.ToText(), args)
    total += trace.num_params
    args = trace.outputs
  return total


@pytest.mark.parametrize(
  'model, stages, millions',
  [
    (models.AmoebaNetD18x208, 1, 81.5),
    (models.AmoebaNetD18x416, 1, 319.0),
    (models.AmoebaNetD18x544, 2, 542.7),
    (models.AmoebaNetD36x544, 4, 1060),
    (models.AmoebaNetD72x512, 8, 1840),
  ],
)
def test_parameters_of_table_1a(model, stages, millions):
  assert _num_params(model) == pytest.approx(millions * 1e6, rel=0.005)
  assert model.NUM_STAGES == stages


def test_the_deepest_model_repeats_few_layers():
  layers = models.AmoebaNetD72x512().Task().pipeline.layer_tpl
  assert len(layers) == 1 + 2 + 24 + 1 + 24 + 1 + 24
  assert len({id(p) for p in layers}) == 1 + 4 + 3 * 3


class _Short(models.AmoebaNetDMini):
  """The first cells of the Mini model: quicker to trace."""

  def Task(self):
    p = super().Task()
    p.pipeline.layer_tpl = p.pipeline.layer_tpl[:4]
    [*_, last] = p.pipeline.layer_tpl
    p.pipeline.loss_tpl.input_dim = amoebanet.Cell.output_channels(last)
    return p


@pytest.mark.parametrize(
  'model',
  [_Short, pytest.param(models.AmoebaNetDMini, marks=pytest.mark.slow)],
)
def test_training_does_not_depend_on_the_stages(model):
  found = helpers.losses(model, 3, num_stages=2)
  assert found == helpers.losses(model, 3, num_stages=1)
  assert all(0 < loss < 10 for loss in found)
