"""Calls one layer of the list as a pure function of its arguments."""

from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe import randomness


def fprop(
  layer: base_layer.BaseLayer,
  name: str,
  theta: py_utils.NestedMap,
  args: tuple,
  seed: tf.Tensor,
  micro_batch: randomness.MicroBatch,
) -> tuple:
  """Runs `layer.FProp(theta, *args)` with all that it may depend on given.

  Assertions are left out: TensorFlow keeps ops with side effects in program
  order, which would serialise the devices.

  Args:
    layer: any Lingvo layer.
    name: its name in the list; its ops are scoped by it.
    theta: its weights as tensors.
    args: tensors, structures of tensors, or None.
    seed: int64 scalar from `randomness.layer_seed`.
    micro_batch: which examples `args` hold.

  Returns:
    The outputs as a tuple, whatever FProp returns.
  """
  with (
    tf.name_scope(name),
    py_utils.RemoveAssertContext(remove=True),
    py_utils.GlobalStepContext(micro_batch.step),
    randomness.scope(name, seed, micro_batch),
  ):
    return as_tuple(layer.FProp(theta, *args))


def as_tuple(outputs: Any) -> tuple:
  """Returns the outputs of an FProp as the arguments of the next one."""
  if isinstance(outputs, (tuple, list)):
    return tuple(outputs)
  return (outputs,)
