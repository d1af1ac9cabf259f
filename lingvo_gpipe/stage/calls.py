"""Calls of functions that stay out of line, made fast to trace and to start.

A step has thousands of calls of a dozen functions. tf.function's own calls
would infer shapes through the body of the function each time, in Python and
C++, for shapes that are known from the first.
"""

from collections.abc import Sequence

import tensorflow as tf


def out_of_line(function):
  """Wraps `function` as a tf.function that TensorFlow does not inline."""
  return tf.function(
    function, autograph=False, experimental_attributes={'_noinline': True}
  )


class Call:
  """Calls one concrete function, of flat tensors to flat tensors."""

  def __init__(self, function: tf.types.experimental.ConcreteFunction):
    self._function = function
    outputs = tf.nest.flatten(function.structured_outputs)
    self._dtypes = [t.dtype for t in outputs]
    self._shapes = [t.shape for t in outputs]
    definition = function.function_def
    is_stateful = definition.signature.is_stateful
    self._op_type = f'{"Stateful" if is_stateful else ""}PartitionedCall'
    self._attributes = _attributes(definition)

  def __call__(self, args: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Adds a call to the graph under construction; eagerly, runs it."""
    if tf.executing_eagerly():
      return tf.nest.flatten(self._function(*args))
    graph = tf.compat.v1.get_default_graph()
    self._function.add_to_graph(graph)
    op = graph.create_op(
      self._op_type,
      [*args, *self._function.captured_inputs],
      self._dtypes,
      attrs=self._attributes,
    )
    for output, shape in zip(op.outputs, self._shapes, strict=True):
      output.set_shape(shape)
    return op.outputs


def _attributes(definition):
  attribute = tf.compat.v1.AttrValue

  def types(args):
    return attribute(list=attribute.ListValue(type=[a.type for a in args]))

  config = tf.compat.v1.ConfigProto()
  config.graph_options.rewrite_options.disable_meta_optimizer = True
  return {
    'config_proto': attribute(s=config.SerializeToString()),
    'Tin': types(definition.signature.input_arg),
    'Tout': types(definition.signature.output_arg),
    'f': attribute(
      func=tf.compat.v1.NameAttrList(name=definition.signature.name)
    ),
    '_disable_call_shape_inference': attribute(b=True),
  }
