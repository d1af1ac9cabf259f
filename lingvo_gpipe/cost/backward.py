"""What the backward pass of a traced layer costs: FLOPs, and bytes it needs.

  inputs --> forward ops --> outputs
                 | internals            kept from forward, or recomputed
dinputs <-- backward ops <-- cotangents
                 '--> weight gradients
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import graph_walk
from lingvo_gpipe.cost import flops, memory


@dataclasses.dataclass(frozen=True)
class BackwardCost:
  """FLOPs and bytes of one layer's backward pass for one micro-batch.

  Attributes:
    input_flops: of the gradients of its inputs.
    weight_flops: of the gradients of its weights, beyond those.
    kept_inputs: for each input leaf, whether it is needed.
    kept_outputs: for each output leaf, whether it is needed.
    internal_bytes: other tensors of the forward pass that are needed.
    weight_bytes: of those that the weight half alone needs, and what the
      input half hands it: held between the two.
    forward_workspace: bytes that forward holds at most, beside inputs, outputs
      and what is kept.
    workspace: bytes that backward holds at most, gradients of outputs, inputs
      and weights included.
  """

  input_flops: int
  weight_flops: int
  kept_inputs: tuple[bool, ...]
  kept_outputs: tuple[bool, ...]
  internal_bytes: int
  weight_bytes: int
  forward_workspace: int
  workspace: int


def trace(
  graph: tf.Graph,
  weights: Sequence[tf.Tensor],
  rng: Sequence[tf.Tensor],
  input_leaves: Sequence[tf.Tensor | None],
  output_leaves: Sequence[tf.Tensor | None],
  tape: tf.GradientTape,
) -> BackwardCost:
  """Adds a layer's backward pass to its graph and looks at both.

  Args:
    graph: where the forward pass is.
    weights: that the tape has watched: those that are trained.
    rng: tensors that randomness depends on.
    input_leaves: flat inputs of the layer.
    output_leaves: flat outputs.
    tape: that saw the forward pass, persistent or not.
  """
  inputs = [t for t in input_leaves if t is not None]
  outputs = [t for t in output_leaves if t is not None]
  differentiable = [t for t in inputs if t.dtype.is_floating]
  targets = [t for t in outputs if t.dtype.is_floating]
  cotangents = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
  found = tape.gradient(targets, [*differentiable, *weights], cotangents)
  dinputs = [t for t in found[: len(differentiable)] if t is not None]
  dinputs = [tf.convert_to_tensor(t) for t in dinputs]
  dweights = [
    tf.convert_to_tensor(t)
    for t in found[len(differentiable) :]
    if t is not None
  ]
  own = graph_walk.descendants([*inputs, *rng, *cotangents])
  forward = graph_walk.ancestors(outputs) & own
  input_half = graph_walk.ancestors(dinputs) & own - forward
  weight_half = graph_walk.ancestors(dweights) & own - forward - input_half
  backward = input_half | weight_half
  given = {t.op for t in inputs}

  kept = _buffers(graph_walk.crossing(forward | given, backward))
  for_weights = _buffers(
    graph_walk.crossing(forward | given | input_half, weight_half)
  )
  input_buffers = _buffers(inputs)
  output_buffers = _buffers(outputs)
  internals = {
    name: t
    for name, t in kept.items()
    if name not in input_buffers and name not in output_buffers
  }
  accounted = [*kept.values(), *inputs, *outputs]
  return BackwardCost(
    input_flops=flops.count(graph, input_half),
    weight_flops=flops.count(graph, weight_half),
    kept_inputs=tuple(_is_in(t, kept) for t in input_leaves),
    kept_outputs=tuple(
      _is_in(t, kept) and not _is_in(t, input_buffers) for t in output_leaves
    ),
    internal_bytes=sum(map(memory.size, internals.values())),
    weight_bytes=sum(
      memory.size(t)
      for name, t in for_weights.items()
      if name not in input_buffers and name not in output_buffers
    ),
    forward_workspace=memory.peak(_in_order(graph, forward), accounted),
    # Gradients of weights are added to their sums as soon as they are there.
    workspace=memory.peak(_in_order(graph, backward), accounted, cotangents),
  )


def _buffers(tensors):
  return {b.name: b for b in map(memory.buffer, tensors)}


def _is_in(tensor, buffers) -> bool:
  return tensor is not None and memory.buffer(tensor).name in buffers


def _in_order(graph, ops):
  return [op for op in graph.get_operations() if op in ops]
