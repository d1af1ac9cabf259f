"""When each action ran: simulated or measured, the same data."""

from typing import NamedTuple

from lingvo_gpipe.schedule.action import Action

# Part of a backward in a measured timeline: activations computed again.
RECOMPUTE = 'R'

KIND_NAMES = {
  'F': 'forward',
  'B': 'backward',
  'I': 'input gradient',
  'W': 'weight gradient',
  'U': 'update',
  RECOMPUTE: 'recompute',
}


class Span(NamedTuple):
  """One action on a device.

  Attributes:
    action: what ran; of kind RECOMPUTE for that part of a backward.
    device: where.
    arrived: when all it needs was on the device, in seconds.
    start: when it began.
    end: when it was done.
  """

  action: Action
  device: int
  arrived: float
  start: float
  end: float


# In no particular order between devices.
Timeline = tuple[Span, ...]


def makespan(timeline: Timeline) -> float:
  """Returns the seconds from the first start to the last end."""
  return max(s.end for s in timeline) - min(s.start for s in timeline)


def busy_seconds(timeline: Timeline) -> list[float]:
  """Returns for each device how long it did anything."""
  seconds = [0.0] * (1 + max(s.device for s in timeline))
  for span in timeline:
    seconds[span.device] += span.end - span.start
  return seconds


def bubble(timeline: Timeline) -> float:
  """Returns the share of all devices' time in which they did nothing."""
  busy = busy_seconds(timeline)
  return 1 - sum(busy) / (len(busy) * makespan(timeline))
