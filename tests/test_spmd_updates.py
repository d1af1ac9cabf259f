"""Updates as pure functions are those of TensorFlow's optimizers."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import optimizer, py_utils

from lingvo_gpipe import errors
from lingvo_gpipe.engine.spmd import updates


@pytest.mark.parametrize(
  'p',
  [
    optimizer.SGD.Params(),
    optimizer.Momentum.Params(),
    optimizer.Momentum.Params().Set(alpha=0.5, use_nesterov=True),
    optimizer.Adam.ParamsB(),
    optimizer.RMSProp.Params().Set(momentum=0.9, epsilon=1e-3),
  ],
  ids=lambda p: p.cls.__name__,
)
def test_three_steps_are_those_of_variables(p):
  rng = np.random.default_rng(1)
  start = rng.normal(size=[3, 4]).astype(np.float32)
  gradients = rng.normal(size=[3, 3, 4]).astype(np.float32)
  variable = tf.Variable(start)
  one = p.Copy().Set(add_summary_in_apply=False).Instantiate()
  made = []

  def note(creator, **kwargs):
    made.append(creator(**kwargs))
    return made[-1]

  def apply(gradient):
    pair = py_utils.VarGrad(variable, gradient)
    one.Apply(lambda: 0.1, py_utils.NestedMap(w=pair))

  update = updates.Update(p, tf.TensorSpec([3, 4]))
  compiled = tf.function(update, autograph=False)
  weight, slots, shared = tf.constant(start), None, None
  for gradient in gradients:
    if slots is None:
      # Slots begin as the optimizer makes them.
      with tf.variable_creator_scope(note):
        with tf.__internal__.FuncGraph('slots').as_default():
          apply(tf.zeros([3, 4]))
      slots = [v.read_value() for v in made if v.shape.rank]
      shared = [v.read_value() for v in made if not v.shape.rank]
      assert len(slots) == len(update.slots)
      assert len(shared) == len(update.shared)
    weight, slots, shared = compiled(
      weight, slots, shared, tf.constant(gradient), tf.constant(0.1)
    )
    apply(tf.constant(gradient))
  np.testing.assert_allclose(weight, variable, rtol=1e-5, atol=1e-6)


def test_unknown_update_is_named():
  with pytest.raises(errors.UserError, match='Adagrad.*SGD, Momentum, Adam'):
    updates.Update(optimizer.Adagrad.Params(), tf.TensorSpec([2]))
