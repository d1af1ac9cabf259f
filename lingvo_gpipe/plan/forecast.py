"""What will happen if a plan is carried out: seconds and bytes.

Bytes of a device at its peak, by kind:

    weights      variables of its layers, trainable or not
    slots        of the optimizer
    gradients    running sums, which micro-batches are added to in place
    batch        what it takes of the mini-batch, whole and in micro-batches
    activations  kept for backward, of all micro-batches in flight
    workspace    what one action holds beside that while it runs: activations
                 computed again, temporary tensors, outputs to hand on
"""

import dataclasses
import functools

from lingvo_gpipe import checkpointing
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import costs as costs_lib
from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import plan as plan_lib
from lingvo_gpipe.schedule import memory

# The mini-batch is there as a whole beside its micro-batches.
BATCH_COPIES = 2


@dataclasses.dataclass(frozen=True)
class StageForecast:
  """One stage; activations are those of `in_flight` micro-batches.

  Attributes:
    layers: range of its layers.
    device: index of its device.
    num_params: trainable weights.
    forward_flops: of one micro-batch.
    seconds: of F, B, I and W of one micro-batch, recomputation included.
    recompute_seconds: of one micro-batch.
    in_flight: micro-batches that it holds at most.
    bytes: by kind.
  """

  layers: range
  device: int
  num_params: int
  forward_flops: int
  seconds: dict[str, float]
  recompute_seconds: float
  in_flight: int
  bytes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Forecast:
  """The whole pipeline.

  Attributes:
    stages: one by one.
    times: for the simulator.
    step_seconds: of a whole step, update included.
    bubble: idle share of all devices while the pipeline runs.
    causes: the same by cause.
    device_bytes: of each device at its peak.
    recompute_share: of all work.
    imbalance: the slowest stage over the mean.
  """

  stages: tuple[StageForecast, ...]
  times: schedule_lib.Times
  step_seconds: float
  bubble: float
  causes: dict[str, float]
  device_bytes: tuple[int, ...]
  recompute_share: float
  imbalance: float


def predict(plan: plan_lib.Plan, machine: machine_lib.Machine) -> Forecast:
  """Plays the plan on paper."""
  costs = costs_lib.Costs(plan.network, machine)
  device_of = schedule_lib.placement(plan.schedule)
  in_flight = memory.stage_peaks(plan.schedule)
  stages = tuple(
    _stage(plan, costs, k, device_of[k], in_flight[k])
    for k in range(plan.num_stages)
  )
  times = schedule_lib.Times(
    tuple(s.seconds for s in stages),
    tuple(
      costs.outputs(s.layers.start, s.layers.stop) / machine.bandwidth
      if machine.bandwidth
      else 0.0
      for s in stages[:-1]
    ),
  )
  timeline = schedule_lib.simulate(plan.schedule, times)
  work = [s.seconds['F'] + s.seconds['B'] for s in stages]
  update = max(s.bytes['gradients'] for s in stages)
  makespan = schedule_lib.makespan(timeline)
  return Forecast(
    stages=stages,
    times=times,
    step_seconds=makespan + update * machine.update_seconds,
    bubble=schedule_lib.bubble(timeline) if makespan else 0.0,
    causes=schedule_lib.bubble_by_cause(plan.schedule, times)
    if makespan
    else {},
    device_bytes=_device_bytes(plan, costs, stages),
    recompute_share=sum(s.recompute_seconds for s in stages)
    / (sum(work) or 1.0),
    imbalance=max(work) * len(work) / (sum(work) or 1.0),
  )


def stage_bytes(
  costs: costs_lib.Costs,
  layers: range,
  remat: checkpointing.Remat,
  in_flight: int,
  num_micro_batches: int,
) -> dict[str, int]:
  """Returns the peak bytes of a stage by kind, see the module's docstring."""
  start, stop = layers.start, layers.stop
  kept = costs.kept(start, stop, remat)
  return {
    **static_bytes(costs, layers, num_micro_batches),
    'activations': in_flight * kept,
    'workspace': _workspace(costs, layers, remat),
  }


def static_bytes(
  costs: costs_lib.Costs, layers: range, num_micro_batches: int
) -> dict[str, int]:
  """Returns the bytes of a stage that do not depend on schedule and remat."""
  start, stop = layers.start, layers.stop
  batch = costs.batch_inputs(start, stop)
  return {
    'weights': costs.weights(start, stop),
    'slots': costs.slots(start, stop),
    'gradients': costs.gradients(start, stop),
    'batch': BATCH_COPIES * num_micro_batches * batch,
  }


def _workspace(costs, layers, remat) -> int:
  """Returns what an action holds at most, beside what is kept."""
  start, stop = layers.start, layers.stop
  chain = costs.chain(start, stop)
  backward = checkpointing.peak_bytes(chain, remat, 1)
  backward -= checkpointing.kept_bytes(chain, remat)
  forward = costs.forward_workspace(start, stop) + costs.outputs(start, stop)
  return max(backward, forward)


def _stage(plan, costs, k, device, in_flight):
  stage = plan.stages[k]
  layers = stage.layers
  traces = plan.traces[layers.start : layers.stop]
  speed = costs.machine.speed_of(device)
  seconds = {
    kind: value / speed
    for kind, value in costs.times(layers.start, layers.stop).items()
  }
  last = plan.num_micro_batches - 1
  forward = costs.forward[layers.start : layers.stop]

  def again(i):
    counts = checkpointing.recomputed(plan.remat_of(k, i), len(layers))
    return sum(f * n for f, n in zip(forward, counts, strict=True)) / speed

  recompute = (last * again(0) + again(last)) / (last + 1)
  half = 'I' if costs.sends_back(layers.start, layers.stop) else 'W'
  seconds[half] += recompute
  seconds['B'] = seconds['I'] + seconds['W']
  return StageForecast(
    layers=layers,
    device=device,
    num_params=sum(t.num_params for t in traces),
    forward_flops=sum(t.fprop_flops for t in traces),
    seconds=seconds,
    recompute_seconds=recompute,
    in_flight=in_flight,
    bytes=_bytes_of_both(costs, stage, in_flight, plan.num_micro_batches),
  )


def _bytes_of_both(costs, stage, in_flight, num_micro_batches):
  """Returns the bytes of a stage that may treat the last micro-batch apart."""
  found = stage_bytes(
    costs, stage.layers, stage.remat, in_flight, num_micro_batches
  )
  if stage.last_remat != stage.remat:
    layers = stage.layers.start, stage.layers.stop
    found['activations'] += costs.kept(*layers, stage.last_remat)
    found['activations'] -= costs.kept(*layers, stage.remat)
  return found


def _device_bytes(plan, costs, stages):
  """Returns the peaks of the devices, their stages together."""

  @functools.cache
  def of(k, remat):
    layers = plan.stages[k].layers
    kept = costs.kept(layers.start, layers.stop, remat)
    return kept, _workspace(costs, layers, remat)

  def kept(k, i):
    return of(k, plan.remat_of(k, i))[0]

  def waiting(k, unused_i):
    layers = plan.stages[k].layers
    if not costs.sends_back(layers.start, layers.stop):
      return kept(k, unused_i)  # W does all, I nothing.
    return costs.for_weights(layers.start, layers.stop)

  def working(action):
    return of(action.stage, plan.remat_of(action.stage, action.micro_batch))[1]

  moving = memory.device_bytes(plan.schedule, kept, waiting, working)
  for s in stages:
    moving[s.device] += sum(
      s.bytes[kind] for kind in ('weights', 'slots', 'gradients', 'batch')
    )
  return tuple(moving)
