"""A part of a traced graph as a function of its own.

A step is traced once, forward and backward in one graph, and then cut along the
tensors that are kept between the actions of a schedule:

    inputs ->  forward ops  -> outputs
                   | kept
    cotangents ->  input gradient ops  -> dinputs
                   |         | crossing
    gradients  ->  weight gradient ops  -> gradients, added to

Every op runs in exactly one part, so parts give the bits of the whole, however
it is cut; what a caller has not kept is simply computed again.
"""

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe import graph_walk
from lingvo_gpipe.stage import calls


class GraphPart:
  """The ops between some tensors of a graph and others, out of line."""

  def __init__(
    self,
    graph: tf.Graph,
    gives: Sequence[tf.Tensor],
    given: Iterable[tf.Tensor],
  ):
    """Copies the ops that are needed to compute `gives`.

    Args:
      graph: traced; the caller keeps it alive.
      gives: tensors of the graph to compute.
      given: tensors of the graph that callers have.
    """
    given = {t.name: t for t in given}
    ops, taken = graph_walk.walk_back(gives, given)
    self._takes = [given[name] for name in sorted(taken)]
    computed = [t.name for t in gives if t.name not in given]
    graph_def = _copy_nodes(graph, ops, gives)

    def run(*args):
      known = dict(zip(sorted(taken), args, strict=True))
      results = tf.graph_util.import_graph_def(
        graph_def,
        {name: known[name] for name in _used_names(graph_def, taken)},
        computed,
        name='',
      )
      known.update(zip(computed, results or [], strict=True))
      return [known[t.name] for t in gives]

    function = calls.out_of_line(run)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._takes]
    self._call = calls.Call(function.get_concrete_function(*specs))

  def __call__(self, known: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
    """Returns `gives`, computed from tensors known by their graph's names."""
    return self._call([known[t.name] for t in self._takes])


def _copy_nodes(graph, ops, gives):
  """Returns the definition of `ops`, freed from ops outside of them.

  Control edges go: they keep side effects in order, and a layer with side
  effects is refused long before. So do identities and equal constants, which
  cost TensorFlow time at every call that it prepares.
  """
  whole = graph.as_graph_def()
  part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
  names = {op.name for op in ops}
  nodes = [node for node in whole.node if node.name in names]
  stands_for = _dispensable(nodes, {t.op.name for t in gives})
  for node in nodes:
    if node.name in stands_for:
      continue
    copy = part.node.add(name=node.name, op=node.op)
    for name in node.input:
      if not name.startswith('^'):
        while _plain(name) in stands_for:
          name = stands_for[_plain(name)]
        copy.input.append(name)
    for key, value in node.attr.items():
      if key != '_class':  # Colocation with ops elsewhere.
        copy.attr[key].CopyFrom(value)
  return part


def _dispensable(nodes, keep):
  """Returns the nodes that can go, and for each what takes its place."""
  stands_for, constants = {}, {}
  for node in nodes:
    if node.name in keep:
      continue
    if node.op == 'Identity':
      stands_for[node.name] = node.input[0]
    elif node.op == 'Const':
      value = node.attr['value'].SerializeToString(deterministic=True)
      first = constants.setdefault(value, node.name)
      if first != node.name:
        stands_for[node.name] = first
  return stands_for


def _plain(name):
  """Returns the name of a node's first output without its number."""
  return name.removesuffix(':0')


def _used_names(graph_def, taken):
  """Returns those of `taken` that a node takes."""
  used = {
    i if ':' in i else f'{i}:0' for node in graph_def.node for i in node.input
  }
  return used & taken
