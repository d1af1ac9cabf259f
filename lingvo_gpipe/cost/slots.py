"""Bytes of the variables that an optimizer keeps for the weights of a layer."""

import functools
from collections.abc import Sequence

import tensorflow as tf
from lingvo.core import optimizer, py_utils

from lingvo_gpipe.cost import apart, layer_trace, memory


def slot_bytes(
  p: optimizer.Base.Params, weights: Sequence[layer_trace.Weight]
) -> int:
  """Returns the bytes of all slots; nothing is allocated.

  Args:
    p: Params of a Lingvo optimizer.
    weights: those that it trains.
  """
  text = p.ToText()
  return sum(_slot_bytes(_Hashable(p, text), w.shape, w.dtype) for w in weights)


class _Hashable:
  """Params that may be the key of a cache."""

  def __init__(self, p, text):
    self.p = p
    self.text = text

  def __hash__(self):
    return hash(self.text)

  def __eq__(self, other):
    return self.text == other.text


@functools.cache
def _slot_bytes(hashable, shape, dtype) -> int:
  return apart.build_apart(_trace, hashable.p, shape, dtype)


def _trace(p, shape, dtype):
  """Lets the optimizer make its slots in a graph that is thrown away."""
  with tf.Graph().as_default():
    py_utils.GetOrCreateGlobalStepVar()
    weight = tf.compat.v1.get_variable(
      'weight', shape, tf.dtypes.as_dtype(dtype), use_resource=True
    )
    gradient = tf.compat.v1.placeholder(dtype, shape)
    p = p.Copy().Set(add_summary_in_apply=False)
    made = []

    def note(creator, **kwargs):
      made.append(creator(**kwargs))
      return made[-1]

    with tf.variable_creator_scope(note):
      p.Instantiate().Apply(
        lambda: 1.0, py_utils.NestedMap(w=py_utils.VarGrad(weight, gradient))
      )
    return sum(memory.size(v) for v in made if v.shape.rank)
