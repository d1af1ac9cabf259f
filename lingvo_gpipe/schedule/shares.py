"""What a timeline says in numbers: who was busy, with what, and who waited."""

from lingvo_gpipe.schedule import timeline as timeline_lib
from lingvo_gpipe.schedule.action import effects, needs


def busy_by_stage(
  timeline: timeline_lib.Timeline, num_stages: int
) -> list[float]:
  """Returns for each stage the share of the step in which it worked."""
  seconds = [0.0] * num_stages
  for span in timeline:
    seconds[span.action.stage] += span.end - span.start
  whole = timeline_lib.makespan(timeline)
  return [s / whole for s in seconds]


def recompute(timeline: timeline_lib.Timeline) -> float:
  """Returns the share of all work that computed activations again."""
  again = sum(
    s.end - s.start for s in timeline if s.action.kind == timeline_lib.RECOMPUTE
  )
  return again / sum(timeline_lib.busy_seconds(timeline))


def transfer_wait(timeline: timeline_lib.Timeline, num_stages: int) -> float:
  """Returns the share of devices' time spent waiting for what was under way.

  That is: the device was free, what it needed was made, but had not arrived.
  """
  made = {e: s.end for s in timeline for e in effects(s.action)}
  free, waited = {}, 0.0
  for span in sorted(timeline, key=lambda s: (s.start, s.end)):
    begin = free.get(span.device, span.start)
    free[span.device] = span.end
    if span.action.kind != timeline_lib.RECOMPUTE:
      needed = [made[e] for e in needs(span.action, num_stages)]
      under_way = max([begin, *needed])
      waited += max(0.0, min(span.start, span.arrived) - under_way)
  num_devices = len(timeline_lib.busy_seconds(timeline))
  return waited / (num_devices * timeline_lib.makespan(timeline))
