"""The numbers of a pipeline are those of one device."""

import helpers
import numpy as np
import pytest
import small_models
import tensorflow as tf
from lingvo.core import base_layer, builder_layers, gpipe, layers, py_utils

from lingvo_gpipe import errors, pipelining_layer
from lingvo_gpipe import layers as our_layers

_STEPS = 6
_B, _T, _D = 6, 4, 8


def _block(name='block', dropout=0.2):
  return our_layers.TransformerBlock.Params().Set(
    name=name,
    model_dim=_D,
    hidden_dim=2 * _D,
    num_heads=2,
    atten_dropout_prob=dropout,
    residual_dropout_prob=dropout,
  )


class MeanSquare(base_layer.BaseLayer):
  """Mean over examples of the mean square."""

  def FProp(self, theta, x, *unused):
    return py_utils.NestedMap(
      loss=(tf.reduce_mean(tf.square(x)), tf.constant(float(x.shape[0])))
    )


def _pipeline(layer_tpl=None, **fields):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='pipe',
    random_seed=3,
    loss_tpl=MeanSquare.Params().Set(name='loss'),
    **fields,
  )
  if layer_tpl:
    p.layer_tpl = layer_tpl
  return p.Instantiate()


def _inputs(*shape):
  return tf.random.stateless_normal(shape or [_B, _T, _D], [1, 2])


def _gradients(pipeline, *inputs):
  """Returns (loss, gradients by name) of one step inside a tf.function."""

  @tf.function(autograph=False)
  def run():
    return pipeline.ForwardBackward(pipeline.theta, inputs)

  metrics, gradients = run()
  return metrics.loss[0].numpy(), {
    key: g.numpy() for key, g in gradients.FlattenItems() if g is not None
  }


def _assert_same_bits(a, b):
  assert a[0] == b[0]
  assert a[1].keys() == b[1].keys()
  for key in a[1]:
    np.testing.assert_array_equal(a[1][key], b[1][key], err_msg=key)


@pytest.fixture(scope='module')
def reference():
  return helpers.losses(
    small_models.Micro, _STEPS, num_stages=1, num_micro_batches=8
  )


@pytest.mark.parametrize('num_stages', [2, 3, 8])
def test_losses_are_equal_to_the_bit_for_every_number_of_stages(
  reference, num_stages
):
  assert reference == helpers.losses(
    small_models.Micro, _STEPS, num_stages=num_stages, num_micro_batches=8
  )


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_losses_are_equal_to_the_bit_for_every_remat(reference, remat):
  assert reference == helpers.losses(
    small_models.Micro, _STEPS, num_stages=3, num_micro_batches=8, remat=remat
  )


@pytest.mark.parametrize('num_micro_batches', [1, 2, 3, 32])
def test_losses_agree_for_every_number_of_micro_batches(
  reference, num_micro_batches
):
  found = helpers.losses(
    small_models.Micro,
    _STEPS,
    num_stages=3,
    num_micro_batches=num_micro_batches,
  )
  assert helpers.relative_difference(found, reference).max() < 1e-5


def test_losses_agree_with_a_plain_loop(reference):
  found = helpers.plain_losses(small_models.Micro, _STEPS)
  assert helpers.relative_difference(found, reference).max() < 1e-5


@pytest.mark.parametrize('remat', ['full', 'except_last'])
def test_recomputed_gradients_are_equal_to_the_bit(remat):
  x = _inputs()
  kept = _gradients(
    _pipeline([_block()] * 4, num_stages=2, num_micro_batches=3, remat='none'),
    x,
  )
  recomputed = _gradients(
    _pipeline([_block()] * 4, num_stages=2, num_micro_batches=3, remat=remat), x
  )
  _assert_same_bits(kept, recomputed)


class Mixer(base_layer.BaseLayer):
  """Computes with its inputs (x, skip, ids, None) and hands three on."""

  def _CreateLayerVariables(self):
    init = py_utils.WeightInit.Gaussian(0.3)
    self.CreateVariable('w', py_utils.WeightParams([_D, _D], init))

  def FProp(self, theta, x, skip, ids, none):
    assert none is None
    gain = 1 + tf.cast(ids, x.dtype)[:, tf.newaxis]
    y = tf.tanh(tf.matmul(x, theta.w)) * gain + skip * tf.sigmoid(skip) + x
    return y, skip, ids, none


@pytest.mark.parametrize('num_stages', [1, 2, 3, 5])
def test_skips_integers_and_none_cross_stages(num_stages):
  x, skip, ids = _inputs(_B, _D), _inputs(_B, _D), tf.range(_B)
  mixers = [Mixer.Params().Set(name='mixer')] * 4

  class Start(base_layer.BaseLayer):
    """Makes the skip connection that all later layers use."""

    def _CreateLayerVariables(self):
      init = py_utils.WeightInit.Gaussian(0.3)
      self.CreateVariable('w', py_utils.WeightParams([_D, _D], init))

    def FProp(self, theta, x, skip, ids, none):
      return x, tf.matmul(skip, theta.w), ids, none

  def run(num_stages):
    pipeline = _pipeline(
      [Start.Params().Set(name='start'), *mixers],
      num_stages=num_stages,
      num_micro_batches=2,
    )
    return _gradients(pipeline, x, skip, ids, None)

  _assert_same_bits(run(1), run(num_stages))
  if num_stages == 1:  # And they are the right ones.
    pipeline = _pipeline([Start.Params().Set(name='start'), *mixers])
    theta = pipeline.theta
    with tf.GradientTape() as tape:
      flowing = (x, skip, ids, None)
      for name in list(pipeline.children)[:-1]:
        flowing = pipeline.children[name].FProp(theta[name], *flowing)
      loss = tf.reduce_mean(tf.square(flowing[0]))
    expected = dict(
      zip(
        [key for key, _ in theta.FlattenItems()],
        tape.gradient(loss, theta.Flatten()),
        strict=True,
      )
    )
    for key, gradient in run(1)[1].items():
      np.testing.assert_allclose(gradient, expected[key], rtol=1e-5, atol=1e-7)


def test_fprop_is_differentiable_and_equal_to_the_layers():
  x = _inputs()
  for remat in ('none', 'full'):
    pipeline = _pipeline(
      [_block(dropout=0.0)] * 3, num_stages=3, num_micro_batches=2, remat=remat
    )

    @tf.function(autograph=False)
    def run(x, pipeline=pipeline):
      with tf.GradientTape() as tape:
        tape.watch(x)
        y = pipeline.FProp(pipeline.theta, x)
        loss = tf.reduce_mean(tf.square(y))
      return y, tape.gradient(loss, [x, *pipeline.vars.Flatten()[:3]])

    with tf.GradientTape() as tape:
      tape.watch(x)
      expected = x
      for name in list(pipeline.children)[:-1]:
        expected = pipeline.children[name].FPropDefaultTheta(expected)
      loss = tf.reduce_mean(tf.square(expected))
    wanted = tape.gradient(loss, [x, *pipeline.vars.Flatten()[:3]])
    y, gradients = run(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    for g, w in zip(gradients, wanted, strict=True):
      np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


def test_ready_cut_cells_and_layers_before_them():
  blocks = [_block(f'b{l}') for l in range(4)]
  cells = [
    gpipe.FeatureExtractionLayer.Params().Set(name=f'cell{k}', sub=sub)
    for k, sub in enumerate([blocks[1:2], blocks[2:]])
  ]
  pipeline = _pipeline(
    before_tpl=blocks[:1], cell_tpl=cells, num_micro_batches=2
  )
  plan = pipeline.Plan((_inputs(),))
  assert [list(s.layers) for s in plan.stages] == [[0, 1], [2, 3, 4]]
  flat = _pipeline(blocks, num_stages=1, num_micro_batches=2)
  _assert_same_bits(
    _gradients(pipeline, _inputs()), _gradients(flat, _inputs())
  )


def test_nested_sequences_are_flattened():
  nested = builder_layers.SequentialLayer.Params().Set(
    name='outer',
    repeat=2,
    sub=[
      _block('a'),
      builder_layers.SequentialLayer.Params().Set(
        name='inner', sub=[_block('b')], repeat=2
      ),
    ],
  )
  pipeline = _pipeline([nested], num_stages=6, num_micro_batches=2)
  names = [p for p in pipeline.children if p != 'loss']
  assert names == ['a_000', 'b_000', 'b_001', 'a_001', 'b_002', 'b_003']


def test_micro_batch_size_sets_their_number():
  pipeline = _pipeline([_block()], micro_batch_size=4)
  assert pipeline.Plan((_inputs(),)).micro_batch_sizes == (4, 2)


def test_layers_are_weighed_by_their_flops():
  big = layers.ProjectionLayer.Params().Set(
    name='big', input_dim=_D, output_dim=_D, batch_norm=False
  )
  small = layers.IdentityLayer.Params().Set(name='small')
  pipeline = _pipeline(
    [big, small, small, small, big],
    num_stages=2,
    input_specs=[tf.TensorSpec([_B, _D], tf.float32)],
  )
  stages = pipeline.Plan((_inputs(_B, _D),)).stages
  assert 1 <= stages[0].layers.stop <= 4
  assert 4 in stages[1].layers


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_stages': 6}, 'num_stages=6, but there are only 5 layers'),
    ({'num_micro_batches': 0}, 'num_micro_batches=0: at least 1'),
    ({'remat': 'some'}, "remat='some': choose one of none, full, except_last"),
    ({'devices': ['/cpu:0']}, 'devices names 1 devices, the schedule has 2'),
    ({'cell_tpl': [_block('c')]}, 'set one of layer_tpl'),
  ],
)
def test_mistakes_are_told(fields, message):
  fields = {'num_stages': 2, **fields}
  with pytest.raises(errors.UserError, match=message):
    _pipeline([_block()] * 4, **fields)


def test_more_stages_than_devices():
  with pytest.raises(errors.UserError, match='TensorFlow has 8 CPU device'):
    _pipeline([_block()] * 20, num_stages=9)


def test_more_micro_batches_than_examples():
  pipeline = _pipeline([_block()], num_micro_batches=7)
  with pytest.raises(errors.UserError, match='only 6 examples'):
    _gradients(pipeline, _inputs())
