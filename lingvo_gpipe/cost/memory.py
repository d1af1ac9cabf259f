"""Bytes of a traced graph: which buffers there are, and how many at once.

Some ops make no buffer of their own: a reshape shares that of its input, and
an addition whose input nobody else needs writes its result over it.
"""

from collections.abc import Collection, Iterable

import tensorflow as tf

_SHARES_BUFFER = frozenset(
  ['Identity', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient', 'Bitcast']
)
# Ops that write over an input of the same size if it is needed no more.
_IN_PLACE = frozenset(
  [
    *('Add', 'AddV2', 'BiasAdd', 'Sub', 'Mul', 'RealDiv', 'AddN', 'Maximum'),
    *('Neg', 'Exp', 'Sqrt', 'Rsqrt', 'Square', 'Tanh', 'Sigmoid', 'Relu'),
    *('ReluGrad', 'RsqrtGrad', 'SigmoidGrad', 'TanhGrad', 'Softmax', 'Elu'),
  ]
)


def buffer(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor whose buffer `tensor` is."""
  while tensor.op.type in _SHARES_BUFFER:
    tensor = tensor.op.inputs[0]
  return tensor


def size(tensor: tf.Tensor | tf.TensorSpec) -> int:
  """Returns bytes; a tensor of unknown or no shape has none."""
  elements = tensor.shape.num_elements() or 0
  return elements * tensor.dtype.size if tensor.dtype.is_numpy_compatible else 0


def peak(
  ops: Iterable[tf.Operation],
  free: Collection[tf.Tensor],
  there: Collection[tf.Tensor] = (),
) -> int:
  """Returns the most bytes that `ops` hold at once, run in their order.

  Args:
    ops: in the order in which they were made.
    free: tensors that count for nothing, for they are accounted for elsewhere.
    there: tensors that are there at first, freed after their last use.
  """
  ops = list(ops)
  ignored = {buffer(t).name for t in free}
  last_use = {}
  for position, op in enumerate(ops):
    for t in (*op.inputs, *op.outputs):
      last_use[buffer(t).name] = position
  held = {b.name: size(b) for b in map(buffer, there) if b.name not in ignored}
  most = now = sum(held.values())
  for position, op in enumerate(ops):
    dying = {
      b.name
      for b in map(buffer, op.inputs)
      if b.name in held and last_use[b.name] == position
    }
    made = {
      t.name: size(t)
      for t in op.outputs
      if buffer(t) is t and t.name not in ignored
    }
    reused = 0
    if op.type in _IN_PLACE:
      reused = max((held[b] for b in dying), default=0)
    now += sum(made.values())
    most = max(most, now - min(reused, sum(made.values())))
    held.update(made)
    unused = {name for name in made if last_use[name] == position}
    now -= sum(held.pop(name) for name in dying | unused)
  return most
