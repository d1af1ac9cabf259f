"""The Transformers of GPipe's table 1b, and positions without weights."""

import helpers
import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import tshape
from lingvo_gpipe.params.lm import gpipe_transformer as models

from lingvo_gpipe import cost, errors, layers

_BATCH = 2


def _num_params(model):
  """Traces each Params object once: blocks are one, repeated."""
  pipeline = model().Task().pipeline
  ids = tf.TensorSpec([_BATCH, model.SEQUENCE_LENGTH], tf.int32)
  weights = tf.TensorSpec([_BATCH, model.SEQUENCE_LENGTH], tf.float32)
  args, traces, total = (ids,), {}, 0
  for p in [*pipeline.layer_tpl, pipeline.loss_tpl]:
    if p is pipeline.loss_tpl:
      args += (ids, weights)
    if id(p) not in traces:
      traces[id(p)] = cost.trace_layer(p, args)
    total += traces[id(p)].num_params
    args = traces[id(p)].outputs
  assert len(traces) == 4
  return total


@pytest.mark.parametrize(
  'model, stages, millions',
  [
    (models.Transformer3, 1, 282.2),
    (models.Transformer13, 1, 785.8),
    (models.Transformer103, 8, 5_300),
    (models.Transformer415, 32, 21_000),
    (models.Transformer1663, 128, 83_900),
  ],
)
def test_parameters_of_table_1b(model, stages, millions):
  assert _num_params(model) == pytest.approx(millions * 1e6, rel=0.005)
  assert model.NUM_STAGES == stages
  assert model.NUM_MICRO_BATCHES == 32


def test_training_does_not_depend_on_the_stages():
  model = models.TransformerMini
  found = helpers.losses(model, 3, num_stages=2)
  assert found == helpers.losses(model, 3, num_stages=1)
  assert all(0 < loss < 10 for loss in found)


def _embedding(**fields):
  return layers.TokenEmbedding.Params().Set(
    name='embedding', model_dim=8, positions='sinusoid', **fields
  )


def test_sinusoids_are_those_of_the_paper():
  embedding = _embedding(vocab_size=3).Instantiate()
  assert 'positions' not in embedding.vars
  theta = embedding.theta.Transform(tf.zeros_like)
  [vectors] = embedding.FProp(theta, tf.zeros([1, 20], tf.int32)).numpy()
  for position in (0, 1, 19):
    for j in range(4):
      angle = position / 10_000 ** (2 * j / 8)
      assert vectors[position, 2 * j : 2 * j + 2] == pytest.approx(
        [np.sin(angle), np.cos(angle)], abs=1e-5
      )


def test_fprop_meta_of_sinusoids_gives_the_shape():
  p = _embedding()
  meta = p.cls.FPropMeta(p, tshape.Shape([_BATCH, 5]))
  trace = cost.trace_layer(p, (tf.TensorSpec([_BATCH, 5], tf.int32),))
  assert trace.fprop_flops == int(meta.flops) > 0
  assert trace.outputs[0].shape == [_BATCH, 5, 8]


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'positions': 'rotary'}, 'positions="rotary" is neither'),
    ({'model_dim': 7}, 'even model_dim, not 7'),
  ],
)
def test_wrong_positions_are_told(fields, message):
  with pytest.raises(errors.UserError, match=message):
    _embedding().Set(**fields).Instantiate()
