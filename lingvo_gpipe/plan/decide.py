"""Decides for one schedule and remat: where to cut, what to recompute."""

from collections.abc import Sequence

from lingvo_gpipe import checkpointing, errors, partition
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import costs as costs_lib
from lingvo_gpipe.plan import forecast as forecast_lib
from lingvo_gpipe.plan import remat as remat_lib
from lingvo_gpipe.schedule import memory

Remats = tuple[tuple[checkpointing.Remat, checkpointing.Remat], ...]


class DoesNotFit(errors.UserError):
  """There is no plan within the memory of the devices."""


def cut(
  costs: costs_lib.Costs, schedule: schedule_lib.Schedule, remat: str
) -> tuple[range, ...]:
  """Returns the layers of each stage: the slowest stage is as fast as can be.

  Stages fit into the memory of their devices, several on a device in equal
  parts. With remat=budget a stage counts as fitting when its hungriest layer
  does, the others recomputed around it.

  Raises:
    DoesNotFit: no contiguous cut fits.
  """
  device_of = schedule_lib.placement(schedule)
  in_flight = memory.stage_peaks(schedule)
  num_stages = len(device_of)
  machine = costs.machine
  num_layers = len(costs.network.traces)
  layer_seconds = [
    sum(costs.times(l, l + 1).values()) for l in range(num_layers)
  ]
  if not any(layer_seconds):
    layer_seconds = [1.0] * num_layers
  num_micro_batches = 1 + max(a.micro_batch for a in schedule[0])

  def fits(k, start, stop):
    layers = range(start, stop)
    free = _share_of_memory(costs, device_of, k)
    if remat == 'budget':
      static = forecast_lib.static_bytes(costs, layers, num_micro_batches)
      # The activations of many layers take long to look at.
      left = free - sum(static.values())
      return 0 <= left and (
        _least_activations(costs, layers, in_flight[k]) <= left
      )
    plan = remat_lib.of_stage(remat, len(layers), k == num_stages - 1)
    found = forecast_lib.stage_bytes(
      costs, layers, plan, in_flight[k], num_micro_batches
    )
    return sum(found.values()) <= free

  try:
    return partition.cut(
      layer_seconds,
      num_stages,
      speeds=[machine.speed_of(d) for d in device_of],
      fits=fits if machine.memory else None,
    )
  except partition.DoesNotFit as error:
    raise DoesNotFit(
      f'no cut into {num_stages} stages fits into device_memory'
    ) from error


def remats(
  costs: costs_lib.Costs,
  schedule: schedule_lib.Schedule,
  remat: str,
  cuts: Sequence[range],
) -> Remats:
  """Returns what each stage recomputes, of all micro-batches and of the last.

  Raises:
    DoesNotFit: with remat=budget, a stage fits in no way.
  """
  found = []
  in_flight = memory.stage_peaks(schedule)
  for k, layers in enumerate(cuts):
    if remat == 'budget':
      ordinary = _within_budget(costs, schedule, k, layers, in_flight[k])
    else:
      is_last = k == len(cuts) - 1
      ordinary = remat_lib.of_stage(remat, len(layers), is_last)
    last = remat_lib.of_last_micro_batch(remat, ordinary, len(layers))
    found.append((ordinary, last))
  return tuple(found)


def _within_budget(costs, schedule, k, layers, in_flight):
  device_of = schedule_lib.placement(schedule)
  num_micro_batches = 1 + max(a.micro_batch for a in schedule[0])
  free = _share_of_memory(costs, device_of, k)
  if free is None:
    return checkpointing.keep_all(len(layers))
  static = forecast_lib.static_bytes(costs, layers, num_micro_batches)
  free -= sum(static.values()) + costs.outputs(layers.start, layers.stop)
  chain = costs.chain(layers.start, layers.stop)
  found = checkpointing.cheapest(chain, in_flight, int(free))
  if found is None:
    raise DoesNotFit(
      f'stage {k} (layers {layers.start} to {layers.stop - 1}) does not fit '
      'into device_memory, whatever is recomputed'
    )
  return found


def _share_of_memory(costs, device_of, k):
  whole = costs.machine.memory_of(device_of[k])
  return whole and whole / device_of.count(device_of[k])


def _least_activations(costs, layers, in_flight) -> int:
  """Returns a bound from below for what a stage holds in any way."""
  chain = costs.chain(layers.start, layers.stop)
  hungriest = max(
    i + w for i, w in zip(chain.internal, chain.workspace, strict=True)
  )
  return in_flight * chain.boundary[0] + hungriest
