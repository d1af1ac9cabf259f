"""Plays a schedule on paper: given the times of its actions, when each runs."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from lingvo_gpipe.schedule import timeline as timeline_lib
from lingvo_gpipe.schedule.action import (
  BACKWARD,
  FORWARD,
  INPUT_GRADIENT,
  KINDS,
  UPDATE,
  WEIGHT_GRADIENT,
  Action,
  Schedule,
  effects,
  needs,
  num_stages,
  placement,
)
from lingvo_gpipe.schedule.verification import global_order


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds that the actions of each stage take.

  Attributes:
    seconds: for each stage, kind -> seconds; an update takes none.
    transfer: seconds from stage k to k + 1 and back, where they are on
      different devices; K - 1 of them.
  """

  seconds: tuple[dict[str, float], ...]
  transfer: tuple[float, ...]

  def of(self, action: Action) -> float:
    if action.kind == UPDATE:
      return 0.0
    return self.seconds[action.stage][action.kind]

  def without_transfer(self) -> 'Times':
    return Times(self.seconds, (0.0,) * len(self.transfer))


def equal_times(
  num_stages: int,
  forward: float = 1.0,
  input_gradient: float = 1.0,
  weight_gradient: float = 1.0,
  backward: float | None = None,
  transfer: float = 0.0,
) -> Times:
  """Returns the times of equal stages; B takes I and W unless it is given."""
  if backward is None:
    backward = input_gradient + weight_gradient
  seconds = {
    FORWARD: forward,
    BACKWARD: backward,
    INPUT_GRADIENT: input_gradient,
    WEIGHT_GRADIENT: weight_gradient,
  }
  return Times((seconds,) * num_stages, (transfer,) * (num_stages - 1))


def mean_times(timeline: timeline_lib.Timeline, num_stages: int) -> Times:
  """Returns the mean times of a measured timeline, for instant transfers.

  A recomputation counts as part of the backward that follows it. Kinds that did
  not run take no time.
  """
  seconds = [collections.Counter() for _ in range(num_stages)]
  counts = [collections.Counter() for _ in range(num_stages)]
  following = {
    (s.device, s.start): s.action.kind
    for s in timeline
    if s.action.kind != timeline_lib.RECOMPUTE
  }
  for span in timeline:
    k, kind = span.action.stage, span.action.kind
    if kind == timeline_lib.RECOMPUTE:
      kind = following[span.device, span.end]
    else:
      counts[k][kind] += 1
    seconds[k][kind] += span.end - span.start
  means = [
    {kind: of_stage[kind] / max(count[kind], 1) for kind in KINDS}
    for of_stage, count in zip(seconds, counts, strict=True)
  ]
  return Times(tuple(means), (0.0,) * (num_stages - 1))


def simulate(
  schedule: Schedule, times: Times, num_slices: int = 1
) -> timeline_lib.Timeline:
  """Returns when each action of a verified schedule runs.

  A device starts an action as soon as the one before is done and all that it
  needs has arrived. The first start is at 0.
  """
  stages = num_stages(schedule)
  device_of = placement(schedule)
  done, free, spans = {}, [0.0] * len(schedule), []
  for action in global_order(schedule, stages, num_slices):
    k = action.stage
    device = device_of[k]
    arrivals = [
      done[effect] + _transfer(times.transfer, device_of, effect.stage, k)
      for effect in needs(action, stages, num_slices)
    ]
    arrived = max(arrivals, default=0.0)
    start = max(arrived, free[device])
    free[device] = start + times.of(action)
    spans.append(
      timeline_lib.Span(action, device, arrived, start, free[device])
    )
    for effect in effects(action):
      done[effect] = free[device]
  return tuple(spans)


def bubble_by_cause(
  schedule: Schedule, times: Times, num_slices: int = 1
) -> dict[str, float]:
  """Returns the idle share of all devices' time, by what would remove it.

  The devices with most to do set the pace. What the others have less to do is
  imbalance, what free transfers would save is transfer. The rest is the price
  of the schedule, as the devices with most to do pay it: fill and drain, before
  their first and after their last action, and waiting in between.
  """
  real = timeline_lib.makespan(simulate(schedule, times, num_slices))
  instant = simulate(schedule, times.without_transfer(), num_slices)
  whole = timeline_lib.makespan(instant)
  busy = timeline_lib.busy_seconds(instant)
  most = max(busy)
  ends = [
    _first_and_last(instant, device)
    for device, seconds in enumerate(busy)
    if math.isclose(seconds, most)
  ]
  fill = sum(first for first, _ in ends) / len(ends)
  drain = sum(whole - last for _, last in ends) / len(ends)
  seconds = {
    'fill': fill,
    'drain': drain,
    'waiting': whole - most - fill - drain,
    'imbalance': most - sum(busy) / len(busy),
    'transfer': real - whole,
  }
  return {cause: idle / real for cause, idle in seconds.items()}


def _first_and_last(timeline, device):
  """Returns the first start and the last end of a device."""
  mine = [s for s in timeline if s.device == device]
  return min(s.start for s in mine), max(s.end for s in mine)


def _transfer(
  transfer: Sequence[float], device_of: Sequence[int], a: int, b: int
) -> float:
  return 0.0 if device_of[a] == device_of[b] else transfer[min(a, b)]
