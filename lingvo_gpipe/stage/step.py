"""One micro-batch's way through a stage and back, in parts.

The whole way is traced once, as one graph, and cut into the parts that the
actions of a schedule run: F, and B or I and W. What one part leaves for another
is kept in a dictionary of the graph's tensors; a part computes what it does not
find there. So B after a forward that kept its activations uses them, and B
after one that did not computes them again: the same ops, the same bits.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.stage import graph_part

Tensors = Sequence[tf.Tensor]
# What is there of a micro-batch, by the names of the traced graph.
Known = dict[str, tf.Tensor]


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
    dinputs: gradients of inputs.
    sums: `gradients` with this micro-batch's share.
  """

  def __init__(
    self,
    graph: tf.__internal__.FuncGraph,
    theta: Tensors,
    inputs: Tensors,
    cotangents: Tensors,
    gradients: Tensors,
    outputs: Tensors,
    dinputs: Tensors,
    sums: Tensors,
  ):
    self.graph = graph
    self.theta = list(theta)
    self.inputs = list(inputs)
    self.cotangents = list(cotangents)
    self.gradients = list(gradients)
    self.outputs = list(outputs)
    self.dinputs = list(dinputs)
    self.sums = list(sums)
    # What comes from weights alone, such as a cast of them, is cheaper to
    # compute again than to keep for every micro-batch.
    own = graph_part.descendants([*inputs, *cotangents, *gradients])
    forward = graph_part.ancestors(outputs) & own
    input_half = graph_part.ancestors(dinputs) & own - forward
    weight_half = graph_part.ancestors(sums) & own - forward - input_half
    self._kept = graph_part.crossing(forward, input_half | weight_half)
    self._for_weights = graph_part.crossing(forward | input_half, weight_half)
    self._captured = {inner.name: outer for outer, inner in graph.captures}
    self._arguments = [*theta, *inputs, *cotangents, *gradients]
    self._arguments += [inner for _, inner in graph.captures]
    self._parts = {}

  def start(self, theta: Tensors, inputs: Tensors) -> Known:
    """Returns what is known of a micro-batch before anything is computed."""
    return {
      **self._captured,
      **_named(self.theta, theta),
      **_named(self.inputs, inputs),
    }

  def is_recorded(self, known: Known) -> bool:
    """Returns whether backward finds all it needs from forward."""
    return all(t.name in known for t in self._kept)

  def forward(self, known: Known) -> list[tf.Tensor]:
    """Returns the outputs and keeps nothing."""
    return self._run('F', dict(known), self.outputs)

  def record(self, known: Known) -> list[tf.Tensor]:
    """Runs forward; adds to `known` what backward needs. Returns outputs."""
    results = self._run('R', known, self.outputs + self._kept)
    return results[: len(self.outputs)]

  def backward(
    self, known: Known, cotangents: Tensors, gradients: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the gradients of the inputs and the new sums."""
    known.update(_named(self.cotangents, cotangents))
    known.update(_named(self.gradients, gradients))
    results = self._run('B', known, self.dinputs + self.sums)
    return results[: len(self.dinputs)], results[len(self.dinputs) :]

  def input_gradient(
    self, known: Known, cotangents: Tensors
  ) -> list[tf.Tensor]:
    """Returns the gradients of the inputs; adds to `known` what W needs.

    A stage whose inputs have no gradient has nothing to do here.
    """
    known.update(_named(self.cotangents, cotangents))
    if not self.dinputs:
      return []
    missing = [t for t in self._for_weights if t.name not in known]
    results = self._run('I', known, self.dinputs + missing)
    return results[: len(self.dinputs)]

  def weight_gradient(
    self, known: Known, gradients: Tensors
  ) -> list[tf.Tensor]:
    """Returns the new sums; what I has left is not computed again."""
    known.update(_named(self.gradients, gradients))
    return self._run('W', known, self.sums)

  def _run(self, kind, known, gives):
    """Runs a part, made when first needed, and adds its results to `known`."""
    if not gives:
      return []
    left = [t for t in self._kept + self._for_weights if t.name in known]
    key = kind, len(left)
    if key not in self._parts:
      self._parts[key] = graph_part.GraphPart(
        self.graph, gives, self._arguments + left
      )
    results = self._parts[key](known)
    known.update(_named(gives, results))
    return results


def _named(tensors: Tensors, values: Tensors) -> Known:
  return {t.name: v for t, v in zip(tensors, values, strict=True)}
