"""The plan of a pipeline: made from shapes, before anything is built."""

import dataclasses
import hashlib
from collections.abc import Sequence

from lingvo.core import base_layer

from lingvo_gpipe import checkpointing, cost
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import costs as costs_lib
from lingvo_gpipe.plan import wiring as wiring_lib


@dataclasses.dataclass(frozen=True)
class StagePlan:
  """One stage.

  Attributes:
    wiring: its layers and what it exchanges with the others.
    device: TensorFlow name of the device.
    remat: what it keeps and recomputes, by layers counted from its first.
    last_remat: the same for the last micro-batch.
  """

  wiring: wiring_lib.StageWiring
  device: str
  remat: checkpointing.Remat
  last_remat: checkpointing.Remat

  @property
  def layers(self) -> range:
    return self.wiring.layers


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is decided about a pipeline.

  Attributes:
    network: the layers, what each costs, and which tensor goes where.
    stages: the layers and the device of each stage.
    micro_batch_sizes: number of examples of each micro-batch.
    remat: which activations are recomputed, by name.
    schedule: what each device does, in which order.
  """

  network: costs_lib.Network
  stages: tuple[StagePlan, ...]
  micro_batch_sizes: tuple[int, ...]
  remat: str
  schedule: schedule_lib.Schedule

  @property
  def names(self) -> tuple[str, ...]:
    return self.network.names

  @property
  def traces(self) -> tuple[cost.LayerTrace, ...]:
    return self.network.traces

  @property
  def wiring(self) -> wiring_lib.Wiring:
    return self.network.wiring

  @property
  def num_stages(self) -> int:
    return len(self.stages)

  @property
  def num_micro_batches(self) -> int:
    return len(self.micro_batch_sizes)

  @property
  def forwards(self) -> schedule_lib.Schedule:
    """The schedule of forwards alone."""
    device_of = schedule_lib.placement(self.schedule)
    return schedule_lib.forward_only(device_of, self.num_micro_batches)

  def for_replica(
    self, devices: Sequence[str], micro_batch_sizes: Sequence[int]
  ) -> 'Plan':
    """Returns the plan on other devices, for other sizes of micro-batches."""
    device_of = schedule_lib.placement(self.schedule)
    stages = [
      dataclasses.replace(stage, device=devices[device])
      for stage, device in zip(self.stages, device_of, strict=True)
    ]
    return dataclasses.replace(
      self, stages=tuple(stages), micro_batch_sizes=tuple(micro_batch_sizes)
    )

  def remat_of(self, k: int, i: int) -> checkpointing.Remat:
    """Returns what stage k keeps and recomputes of micro-batch i."""
    stage = self.stages[k]
    if i == self.num_micro_batches - 1:
      return stage.last_remat
    return stage.remat


def trace_network(
  layers: Sequence[base_layer.BaseLayerParamsT],
  inputs: tuple,
  targets: tuple,
  batch_dim: int,
  optimizer=None,
  tied: Sequence[tuple[str, str]] = (),
) -> costs_lib.Network:
  """Traces every layer on the shapes that reach it; equal ones only once.

  Args:
    layers: Params with names; the last takes `targets` after its inputs.
    inputs: specs of the first layer's arguments, for one micro-batch.
    targets: specs of the last layer's further arguments.
    batch_dim: which dimension counts the examples.
    optimizer: Params of the optimizer whose slots count, or None.
    tied: pairs of weights (or layers) of which the first is the second.

  Raises:
    UserError: a layer cannot be in a pipeline.
  """
  known = {}
  keys, traces, slots = [], [], []
  builder = wiring_lib.WiringBuilder(inputs)
  for position, p in enumerate(layers):
    if position == len(layers) - 1:
      builder.bring_in(targets)
    args = builder.args()
    key = f'{structure_key(p)} {args}'
    if key not in known:
      known[key] = cost.trace_layer(p, args, batch_dim)
    trace = _without_tied(known[key], p.name, tied)
    keys.append(hashlib.md5(key.encode()).hexdigest())
    traces.append(trace)
    slots.append(optimizer and cost.slot_bytes(optimizer, trace.weights) or 0)
    builder.add(trace)
  return costs_lib.Network(
    names=tuple(p.name for p in layers),
    keys=tuple(keys),
    traces=tuple(traces),
    wiring=builder.build(),
    slot_bytes=tuple(slots),
  )


def _without_tied(trace, name, tied):
  """Takes weights that are another layer's out of what counts as its own.

  Their values and gradients still take their place where the layer is.
  """
  own = tuple(
    w for w in trace.weights if not _is_tied(f'{name}/{w.name}', tied)
  )
  if len(own) == len(trace.weights):
    return trace
  away = sum(w.size for w in trace.weights) - sum(w.size for w in own)
  return dataclasses.replace(
    trace, weights=own, num_params=trace.num_params - away
  )


def _is_tied(path, tied):
  return any(f'{path}/'.startswith(f'{later}/') for later, *_ in tied)


def structure_key(p: base_layer.BaseLayerParamsT) -> str:
  """Returns a text that is equal for layers that differ in name alone."""
  return f'{p.cls.__module__}.{p.Copy().Set(name="layer").ToText()}'


def make_plan(
  network: costs_lib.Network,
  micro_batch_sizes: Sequence[int],
  schedule: schedule_lib.Schedule,
  devices: Sequence[str],
  remat: str,
  cuts: Sequence[range],
  remats: Sequence[tuple[checkpointing.Remat, checkpointing.Remat]],
) -> Plan:
  """Puts together what was decided.

  Args:
    network: the layers, traced on the largest micro-batch.
    micro_batch_sizes: number of examples of each micro-batch.
    schedule: verified; says which device has which stage.
    devices: TensorFlow names of the schedule's devices.
    remat: its name.
    cuts: the layers of each stage.
    remats: of each stage, for all micro-batches and for the last one.
  """
  device_of = schedule_lib.placement(schedule)
  stages = [
    StagePlan(network.wiring.stage(layers), devices[device], *of_stage)
    for layers, device, of_stage in zip(cuts, device_of, remats, strict=True)
  ]
  return Plan(
    network=network,
    stages=tuple(stages),
    micro_batch_sizes=tuple(micro_batch_sizes),
    remat=remat,
    schedule=schedule,
  )
