"""Refuses layers that rematerialisation or splitting would silently change.

A stage may run twice for one micro-batch (forward, and again in backward), and
M times a step. A layer that draws from a stateful generator would draw another
mask the second time; one that assigns to a variable would assign twice or M
times; one that reads its variables behind theta's back would get no gradient.
"""

import re
from collections.abc import Iterable, Iterator

import tensorflow as tf

from lingvo_gpipe import errors

_RANDOM_OP = re.compile(
  'Random(?!Dataset)|TruncatedNormal|Parameterized|Multinomial'
  '|Rng(ReadAndSkip|Skip)|Stateful(Uniform|StandardNormal|Truncated|Random)'
)
_ASSIGN_OP = re.compile(
  'Assign|Resource(Scatter|Apply|SparseApply)|Scatter.*Add'
)
_VARIABLE_OP = re.compile('ReadVariableOp|ResourceGather|VarHandleOp|Variable')

# In this order: an assignment also reads, and is the better explanation.
_REFUSED = (
  (
    _RANDOM_OP,
    'draws new random numbers each time it runs, so a recomputed activation '
    'would differ from the first. Use '
    "lingvo.core.layers.DeterministicDropoutLayer, or the layer's own "
    'deterministic field (for attention: atten_dropout_deterministic=True).',
  ),
  (
    _ASSIGN_OP,
    'assigns to a variable, which would happen once for every micro-batch and '
    'again when recomputed. For batch normalisation set batch_norm=False and '
    'use LayerNorm or GroupNorm.',
  ),
  (
    _VARIABLE_OP,
    'reads a variable directly. FProp must take weights from its theta '
    'argument, not from self.vars or self.theta.',
  ),
)


def check(layer: str, graph: tf.Graph, ops: Iterable[tf.Operation]) -> None:
  """Raises a UserError if `ops`, the FProp of `layer`, are not repeatable."""
  found = [
    (op_type, op_name)
    for op_type, op_name in _all_ops(graph, ops)
    if not op_type.startswith('Stateless')
  ]
  for pattern, why in _REFUSED:
    for op_type, op_name in found:
      if pattern.match(op_type):
        raise errors.UserError(
          f'Layer "{layer}" cannot stand in a pipeline: its op "{op_name}" '
          f'({op_type}) {why}'
        )


def _all_ops(
  graph: tf.Graph, ops: Iterable[tf.Operation]
) -> Iterator[tuple[str, str]]:
  """Yields (type, name) of the ops and of those in the functions they call."""
  functions = {
    f.signature.name: f for f in graph.as_graph_def().library.function
  }
  pending, seen = [], set()
  for op in ops:
    yield op.type, op.name
    pending.extend(_called(op.node_def, functions))
  while pending:
    name = pending.pop()
    if name not in seen:
      seen.add(name)
      for node in functions[name].node_def:
        yield node.op, node.name
        pending.extend(_called(node, functions))


def _called(node, functions) -> list[str]:
  """Names of the functions that are attributes of a NodeDef."""
  called = []
  for attr in node.attr.values():
    called += [f.name for f in (attr.func, *attr.list.func) if f.name]
  return [name for name in called if name in functions]
