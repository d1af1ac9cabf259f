"""Who does what when. Plain data; this room imports no TensorFlow."""

from lingvo_gpipe.schedule.action import (
  Action,
  Schedule,
  num_stages,
  placement,
)
from lingvo_gpipe.schedule.by_name import NAMES, make, make_or_read
from lingvo_gpipe.schedule.fill_drain import forward_only
from lingvo_gpipe.schedule.simulation import (
  Times,
  bubble_by_cause,
  mean_times,
  simulate,
)
from lingvo_gpipe.schedule.timeline import Span, Timeline, bubble, makespan
from lingvo_gpipe.schedule.verification import (
  ScheduleError,
  global_order,
  verify,
)

__all__ = [
  'NAMES',
  'Action',
  'Schedule',
  'ScheduleError',
  'Span',
  'Timeline',
  'Times',
  'bubble',
  'bubble_by_cause',
  'forward_only',
  'global_order',
  'make',
  'make_or_read',
  'makespan',
  'mean_times',
  'num_stages',
  'placement',
  'simulate',
  'verify',
]
