"""What any run of layers would cost as a stage, from the costs of its layers.

Sums over a run are differences of running totals, so asking for one of the
many runs that a partitioner looks at takes no time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import checkpointing, cost
from lingvo_gpipe.cost import memory
from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import wiring as wiring_lib


@dataclasses.dataclass(frozen=True)
class Network:
  """A list of layers, traced on micro-batches of one size.

  Attributes:
    names: of the layers, unique.
    keys: equal for layers that cost the same.
    traces: what each layer costs.
    wiring: which tensor goes where.
    slot_bytes: of the optimizer, for each layer.
  """

  names: tuple[str, ...]
  keys: tuple[str, ...]
  traces: tuple[cost.LayerTrace, ...]
  wiring: wiring_lib.Wiring
  slot_bytes: tuple[int, ...]


class Costs:
  """Times and bytes of runs of layers, for one micro-batch."""

  def __init__(self, network: Network, machine: machine_lib.Machine):
    self.network = network
    self.machine = machine
    traces = network.traces
    seconds = [
      _seconds(trace, key, machine)
      for trace, key in zip(traces, network.keys, strict=True)
    ]
    self.forward = tuple(s.forward for s in seconds)
    self._forward = _totals(self.forward)
    self._input_gradient = _totals([s.input_gradient for s in seconds])
    self._weight_gradient = _totals([s.weight_gradient for s in seconds])
    self._weights = _totals([t.param_bytes for t in traces])
    self._slots = _totals(network.slot_bytes)
    self._gradients = _totals([t.trained_bytes for t in traces])
    self._values = [memory.size(v.spec) for v in network.wiring.values]

  def times(self, start: int, stop: int) -> dict[str, float]:
    """Returns seconds of F, I and W of layers start to stop - 1."""
    forward = _between(self._forward, start, stop)
    input_gradient = _between(self._input_gradient, start, stop)
    weight_gradient = _between(self._weight_gradient, start, stop)
    if not self.sends_back(start, stop):
      # Without inputs to send gradients back to, there is the W half alone.
      return {
        'F': forward,
        'I': 0.0,
        'W': input_gradient + weight_gradient,
      }
    return {'F': forward, 'I': input_gradient, 'W': weight_gradient}

  def sends_back(self, start: int, stop: int) -> bool:
    """Returns whether a stage of these layers has inputs with gradients."""
    values = self.network.wiring.values
    return any(values[v].has_gradient for v in self._crossing(start, stop))

  def weights(self, start: int, stop: int) -> int:
    return _between(self._weights, start, stop)

  def slots(self, start: int, stop: int) -> int:
    return _between(self._slots, start, stop)

  def gradients(self, start: int, stop: int) -> int:
    return _between(self._gradients, start, stop)

  def batch_inputs(self, start: int, stop: int) -> int:
    """Returns the bytes that a stage takes of the batch itself."""
    values = self.network.wiring.values
    return self._sum(
      v
      for v in self._crossing(start, stop)
      if values[v].maker == wiring_lib.OUTSIDE
    )

  def outputs(self, start: int, stop: int) -> int:
    """Returns the bytes of all that a stage makes for others."""
    return self._sum(self.network.wiring.stage(range(start, stop)).gives)

  def forward_workspace(self, start: int, stop: int) -> int:
    """Returns what forward holds at most, beside inputs and outputs."""
    traces = self.network.traces[start:stop]
    return max(t.backward.forward_workspace for t in traces)

  def for_weights(self, start: int, stop: int) -> int:
    """Returns what W of all layers needs from I, where they are apart."""
    traces = self.network.traces[start:stop]
    return sum(t.backward.weight_bytes for t in traces)

  @functools.cache  # noqa: B019 - as long-lived as a plan.
  def chain(self, start: int, stop: int) -> checkpointing.Chain:
    """Returns the layers as a chain to be rematerialised."""
    traces = self.network.traces[start:stop]
    return checkpointing.Chain(
      forward=self.forward[start:stop],
      boundary=tuple(
        self._sum(self._crossing(l, stop)) for l in range(start, stop)
      ),
      internal=tuple(
        t.backward.internal_bytes + self._kept_outputs(t) for t in traces
      ),
      workspace=tuple(t.backward.workspace for t in traces),
    )

  def kept(self, start: int, stop: int, remat: checkpointing.Remat) -> int:
    """Returns the bytes that F leaves for B, shared tensors counted once."""
    values = set()
    internals = 0
    if len(remat.recorded) < stop - start:
      values.update(self._crossing(start, stop))
    for l in remat.checkpoints:
      values.update(self._crossing(start + l, stop))
    for l in remat.recorded:
      trace = self.network.traces[start + l]
      layer = self.network.wiring.layers[start + l]
      internals += trace.backward.internal_bytes
      args = tf.nest.flatten(layer.args)
      kept = zip(args, trace.backward.kept_inputs, strict=True)
      values.update(v for v, is_kept in kept if is_kept)
      kept = zip(layer.made, trace.backward.kept_outputs, strict=True)
      values.update(v for v, is_kept in kept if is_kept and v is not None)
    return internals + self._sum(values)

  def _crossing(self, start, stop):
    """Returns the values that layers of a run use and others made."""
    layers = self.network.wiring.layers[start:stop]
    values = self.network.wiring.values
    return {
      v for layer in layers for v in layer.used if values[v].maker < start
    }

  def _kept_outputs(self, trace):
    leaves = tf.nest.flatten(trace.outputs)
    return sum(
      memory.size(leaf)
      for leaf, is_kept in zip(leaves, trace.backward.kept_outputs, strict=True)
      if is_kept
    )

  def _sum(self, values):
    return sum(self._values[v] for v in values)


def _seconds(trace, key, machine) -> machine_lib.LayerSeconds:
  """Returns what was measured, or else what the FLOPs suggest."""
  if key in machine.measured:
    return machine.measured[key]
  backward = trace.backward
  forward = trace.fprop_flops
  # Loops hide their FLOPs: each half of a backward does about the same work.
  input_gradient = backward.input_flops or forward
  weight_gradient = backward.weight_flops or (
    forward if trace.num_params else 0
  )
  return machine_lib.LayerSeconds(
    forward / machine.flops,
    input_gradient / machine.flops,
    weight_gradient / machine.flops,
  )


def _totals(costs: Sequence[float]) -> list[float]:
  return [0, *itertools.accumulate(costs)]


def _between(totals, start, stop):
  return totals[stop] - totals[start]
