"""One micro-batch's way through a stage and back, in parts.

The whole way is traced once, as one graph, and cut into the parts that the
actions of a schedule run: F, and B or I and W, these again layer by layer where
the remat plan says so. What one part leaves for another is kept in a dictionary
of the graph's tensors; a part computes what it does not find there. So B after
a forward that kept its activations uses them, and B after one that did not
computes them again: the same ops, the same bits.

    layer   0     1     2     3           F keeps the input of 2
    F      --->  --->  --->  --->         B: layers 2 and 3 from there, then
    B                  ~~~>  ~~~>            0 and 1 from the stage's input
           ~~~>  ~~~>  <---  <---
           <---  <---                     ~~~> forward again
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe import checkpointing, graph_walk
from lingvo_gpipe.stage import graph_part

Tensors = Sequence[tf.Tensor]
# What is there of a micro-batch, by the names of the traced graph.
Known = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class LayerCut:
  """Where a layer begins in the traced graph, and what its backward gives.

  Attributes:
    inputs: what crosses into it, skip connections over it included.
    dinputs: the gradients of those that have one.
    sums: running sums of the gradients of its weights, its share added.
  """

  inputs: list[tf.Tensor]
  dinputs: list[tf.Tensor]
  sums: list[tf.Tensor]


class Call(NamedTuple):
  """One call among those that an action makes, in order.

  Attributes:
    is_recompute: whether all it does is to compute activations again.
    run: adds it to the graph; returns what it gives.
  """

  is_recompute: bool
  run: Callable[[], list[tf.Tensor]]


class Step:
  """The parts of a stage for micro-batches of one size.

  The tensors are those of the traced graph.

  Attributes:
    graph: forward and backward.
    theta: weights.
    inputs: what forward takes beside weights.
    cotangents: gradients of outputs.
    gradients: running sums of the gradients of the weights.
    outputs: of forward.
    layers: cuts between the layers.
  """

  def __init__(
    self,
    graph: tf.__internal__.FuncGraph,
    theta: Tensors,
    inputs: Tensors,
    cotangents: Tensors,
    gradients: Tensors,
    outputs: Tensors,
    layers: Sequence[LayerCut],
  ):
    self.graph = graph
    self.theta = list(theta)
    self.inputs = list(inputs)
    self.cotangents = list(cotangents)
    self.gradients = list(gradients)
    self.outputs = list(outputs)
    self.layers = list(layers)
    # What comes from weights alone, such as a cast of them, is cheaper to
    # compute again than to keep for every micro-batch.
    own = graph_walk.descendants([*inputs, *cotangents, *gradients])
    forward = graph_walk.ancestors(outputs) & own
    self._checkpoints = [
      [t for t in map(graph_walk.source, cut.inputs) if t.op in forward]
      for cut in layers
    ]
    # For each layer the tensors of forward that its backward takes, and those
    # that the weight half of its backward takes from anywhere.
    self._internals, self._for_weights = _needs(layers, own, forward)
    self._captured = {inner.name: outer for outer, inner in graph.captures}
    self._arguments = [*theta, *inputs, *cotangents, *gradients]
    self._arguments += [inner for _, inner in graph.captures]
    between = [
      *self._checkpoints,
      *self._internals,
      *self._for_weights,
      *(cut.dinputs for cut in layers),
    ]
    self._between = {t.name: t for tensors in between for t in tensors}
    self._parts = {}

  @property
  def sends_back(self) -> bool:
    """Whether any input has a gradient."""
    return bool(self.layers[0].dinputs)

  def start(self, theta: Tensors, inputs: Tensors) -> Known:
    """Returns what is known of a micro-batch before anything is computed."""
    return {
      **self._captured,
      **_named(self.theta, theta),
      **_named(self.inputs, inputs),
    }

  def forward(
    self, known: Known, remat: checkpointing.Remat
  ) -> list[tf.Tensor]:
    """Returns the outputs; adds to `known` what the plan keeps."""
    kept = self._kept(remat.checkpoints, remat.recorded)
    results = self._run({**known}, self.outputs + kept)
    num_outputs = len(self.outputs)
    known.update(_named(kept, results[num_outputs:]))
    return results[:num_outputs]

  def backward(
    self,
    known: Known,
    cotangents: Tensors,
    gradients: Tensors,
    remat: checkpointing.Remat,
    apart: bool = False,
  ) -> Iterator[Call]:
    """Yields the calls of a backward; then `dinputs` and `sums` are known.

    Args:
      known: of the micro-batch, with what forward has kept.
      cotangents: gradients of the outputs.
      gradients: running sums.
      remat: the plan that forward followed.
      apart: whether to recompute in calls of their own, to be timed.
    """
    known.update(_named(self.cotangents, cotangents))
    known.update(_named(self.gradients, gradients))

    def both(run):
      sums = [t for l in run for t in self.layers[l].sums]
      return self.layers[run.start].dinputs + sums

    return self._go_back(known, remat, both, apart)

  def input_gradient(
    self,
    known: Known,
    cotangents: Tensors,
    remat: checkpointing.Remat,
    apart: bool = False,
  ) -> Iterator[Call]:
    """Yields calls; then `dinputs` is known, and what W needs.

    A stage whose inputs have no gradient has nothing to do here.
    """
    known.update(_named(self.cotangents, cotangents))
    if not self.sends_back:
      return iter(())

    def inputs_alone(run):
      for_weights = [t for l in run for t in self._for_weights[l]]
      return self.layers[run.start].dinputs + for_weights

    return self._go_back(known, remat, inputs_alone, apart)

  def weight_gradient(
    self,
    known: Known,
    gradients: Tensors,
    remat: checkpointing.Remat,
    apart: bool = False,
  ) -> Iterator[Call]:
    """Yields calls; then `sums` is known. What I left is not repeated."""
    if not self.sends_back:
      cotangents = _take(known, self.cotangents)
      return self.backward(known, cotangents, gradients, remat, apart)
    known.update(_named(self.gradients, gradients))
    return iter([Call(False, lambda: self._run(known, self._all_sums()))])

  def dinputs(self, known: Known) -> list[tf.Tensor]:
    """Returns the gradients of the inputs after a backward."""
    return _take(known, self.layers[0].dinputs)

  def sums(self, known: Known) -> list[tf.Tensor]:
    """Returns the new sums of gradients of weights after a backward."""
    return _take(known, self._all_sums())

  def _all_sums(self):
    return [t for cut in self.layers for t in cut.sums]

  def _go_back(self, known, remat, gives_of_run, apart):
    """Yields what the plan says, one after another."""
    for planned in remat.backward:
      run = range(planned.start, planned.stop)
      again = self._kept((), run) if apart else []
      if isinstance(planned, checkpointing.Forward):
        again = self._kept(planned.checkpoints, planned.recorded)
      if any(t.name not in known for t in again):
        yield Call(True, functools.partial(self._run, known, again))
      if isinstance(planned, checkpointing.Backward):
        gives = gives_of_run(run)
        if gives:
          yield Call(False, functools.partial(self._run, known, gives))

  def _kept(self, checkpoints, recorded):
    inputs = [
      t
      for l in checkpoints
      if l < len(self.layers)
      for t in self._checkpoints[l]
    ]
    return inputs + [t for l in recorded for t in self._internals[l]]

  def _run(self, known, gives):
    """Runs a part, made when first needed, and adds its results to `known`."""
    missing = {t.name: t for t in gives if t.name not in known}
    if missing:
      left = {name: t for name, t in self._between.items() if name in known}
      key = tuple(missing), tuple(left)
      if key not in self._parts:
        self._parts[key] = graph_part.GraphPart(
          self.graph, missing.values(), [*self._arguments, *left.values()]
        )
      results = self._parts[key](known)
      known.update(_named(missing.values(), results))
    return _take(known, gives)


def _needs(layers, own, forward):
  """Returns what the backward of each layer needs, see Step.__init__."""
  internals, for_weights = [], []
  inputs_halves = set()
  behind = {}
  for cut in reversed(layers):
    halves = graph_walk.walk_back(cut.dinputs, behind)[0] & own - forward
    inputs_halves |= halves
    behind = {**behind, **{t.name: t for t in cut.dinputs}}
    weights = graph_walk.walk_back(cut.sums, behind)[0]
    weights = weights & own - forward - inputs_halves
    internals.append(graph_walk.crossing(forward, halves | weights))
    for_weights.append(graph_walk.crossing(forward | inputs_halves, weights))
  return internals[::-1], for_weights[::-1]


def _named(tensors: Iterable[tf.Tensor], values: Tensors) -> Known:
  return {t.name: v for t, v in zip(tensors, values, strict=True)}


def _take(known: Known, tensors: Tensors) -> list[tf.Tensor]:
  return [known[t.name] for t in tensors]
