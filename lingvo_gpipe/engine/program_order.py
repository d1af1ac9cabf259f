"""Frees a step from orders that TensorFlow would put its calls into.

The schedule has an order of its own, and an op for every part of it.
"""

from collections.abc import Iterable

import tensorflow as tf


def start_of_devices(devices: Iterable[str]) -> dict[str, tf.Operation]:
  """Returns for each device the op that its first action is to wait for.

  It has a reference as output, though nothing reads it: before the first step
  TensorFlow's EncapsulateSubgraphsPass looks for what comes after references,
  and would build the body of every single call to look inside. Calls that come
  after a reference anyway it leaves alone. That halves the time to the first
  step when there are a thousand calls.
  """
  if tf.executing_eagerly():
    return {}
  start = tf.raw_ops.VariableV2(shape=[], dtype=tf.float32).op
  graph = tf.compat.v1.get_default_graph()
  graph.experimental_acd_manager.run_independently(start)
  return dict.fromkeys(devices, start)


def free(graph: tf.Graph, ops: Iterable[tf.Operation]) -> None:
  """Lets calls with side effects overlap those on other devices.

  tf.function runs such ops one after the other in the order of the program.
  """
  for op in ops:
    if op.type in ('StatefulPartitionedCall', 'Timestamp'):
      graph.experimental_acd_manager.run_independently(op)
