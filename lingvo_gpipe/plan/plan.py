"""The plan of a pipeline: made from shapes, before anything is built."""

import dataclasses
from collections.abc import Sequence

from lingvo.core import base_layer

from lingvo_gpipe import cost
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import remat as remat_lib
from lingvo_gpipe.plan import wiring as wiring_lib


@dataclasses.dataclass(frozen=True)
class StagePlan:
  """One stage: its layers and what it exchanges with the others."""

  wiring: wiring_lib.StageWiring
  device: str

  @property
  def layers(self) -> range:
    return self.wiring.layers


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is decided about a pipeline.

  Attributes:
    names: of the layers, unique.
    traces: what each layer costs, for one micro-batch.
    wiring: which tensor goes where.
    stages: the layers and the device of each stage.
    micro_batch_sizes: number of examples of each micro-batch.
    remat: which activations are recomputed, one of REMAT_MODES.
    schedule: what each device does, in which order.
  """

  names: tuple[str, ...]
  traces: tuple[cost.LayerTrace, ...]
  wiring: wiring_lib.Wiring
  stages: tuple[StagePlan, ...]
  micro_batch_sizes: tuple[int, ...]
  remat: str
  schedule: schedule_lib.Schedule

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

  def keeps_activations(self, k: int, i: int) -> bool:
    """Returns whether stage k keeps the activations of micro-batch i."""
    return remat_lib.keeps_activations(
      self.remat, k, i, self.num_stages, self.num_micro_batches
    )


def trace_network(
  layers: Sequence[base_layer.BaseLayerParamsT],
  inputs: tuple,
  targets: tuple,
  batch_dim: int,
) -> tuple[tuple[cost.LayerTrace, ...], wiring_lib.Wiring]:
  """Traces every layer on the shapes that reach it; equal ones only once.

  Args:
    layers: Params with names; the last takes `targets` after its inputs.
    inputs: specs of the first layer's arguments, for one micro-batch.
    targets: specs of the last layer's further arguments.
    batch_dim: which dimension counts the examples.
  """
  known = {}
  traces = []
  builder = wiring_lib.WiringBuilder(inputs)
  for position, p in enumerate(layers):
    if position == len(layers) - 1:
      builder.bring_in(targets)
    args = builder.args()
    key = (structure_key(p), str(args))
    if key not in known:
      known[key] = cost.trace_layer(p, args, batch_dim)
    traces.append(known[key])
    builder.add(known[key])
  return tuple(traces), builder.build()


def structure_key(p: base_layer.BaseLayerParamsT) -> str:
  """Returns a text that is equal for layers that differ in name alone."""
  return f'{p.cls.__module__}.{p.Copy().Set(name="layer").ToText()}'


def make_plan(
  layers: Sequence[base_layer.BaseLayerParamsT],
  inputs: tuple,
  targets: tuple,
  micro_batch_sizes: Sequence[int],
  schedule: schedule_lib.Schedule,
  devices: Sequence[str],
  remat: str,
  batch_dim: int,
  cuts: Sequence[range],
) -> Plan:
  """Plans a pipeline.

  Args:
    layers: Params of the layers, named.
    inputs: specs of the first layer's arguments for the largest micro-batch.
    targets: likewise for the loss layer's arguments beyond its inputs.
    micro_batch_sizes: number of examples of each micro-batch.
    schedule: verified; says which device has which stage.
    devices: TensorFlow names of the schedule's devices.
    remat: one of REMAT_MODES.
    batch_dim: which dimension counts the examples.
    cuts: the layers of each stage.

  Raises:
    UserError: a layer cannot be in a pipeline.
  """
  traces, wiring = trace_network(layers, inputs, targets, batch_dim)
  device_of = schedule_lib.placement(schedule)
  return Plan(
    names=tuple(p.name for p in layers),
    traces=traces,
    wiring=wiring,
    stages=tuple(
      StagePlan(wiring.stage(layer_range), devices[device])
      for layer_range, device in zip(cuts, device_of, strict=True)
    ),
    micro_batch_sizes=tuple(micro_batch_sizes),
    remat=remat,
    schedule=schedule,
  )
