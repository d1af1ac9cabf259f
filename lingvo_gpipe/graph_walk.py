"""Walks through traced graphs: what needs what, and what crosses a cut."""

from collections.abc import Collection, Iterable, Mapping

import tensorflow as tf


def walk_back(
  tensors: Iterable[tf.Tensor], given: Mapping[str, tf.Tensor]
) -> tuple[set[tf.Operation], set[str]]:
  """Returns the ops behind `tensors`, and the given names where they begin.

  Args:
    tensors: to compute.
    given: tensors that need not be computed, by name.
  """
  ops, taken = set(), set()
  pending = []

  def reach(tensor):
    if tensor.name in given:
      taken.add(tensor.name)
    elif tensor.op not in ops:
      ops.add(tensor.op)
      pending.append(tensor.op)

  for tensor in tensors:
    reach(tensor)
  while pending:
    for tensor in pending.pop().inputs:
      reach(tensor)
  return ops, taken


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
  """Returns all ops that are needed to compute `tensors`."""
  return walk_back(tensors, {})[0]


def descendants(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
  """Returns all ops that depend on `tensors`."""
  found, pending = set(), list(tensors)
  while pending:
    for op in pending.pop().consumers():
      if op not in found:
        found.add(op)
        pending.extend(op.outputs)
  return found


def crossing(
  makers: Collection[tf.Operation], users: Collection[tf.Operation]
) -> list[tf.Tensor]:
  """Returns the outputs of `makers` that `users` take, in a fixed order."""
  tensors = [source(t) for op in users for t in op.inputs]
  tensors = {t.name: t for t in tensors if t.op in makers}
  return [tensors[name] for name in sorted(tensors)]


def source(tensor: tf.Tensor) -> tf.Tensor:
  """Follows identities back to where the tensor is made."""
  while tensor.op.type == 'Identity':
    tensor = tensor.op.inputs[0]
  return tensor
