"""Timelines as a Chrome trace, for Perfetto (https://ui.perfetto.dev)."""

import json
from collections.abc import Mapping

from lingvo_gpipe.schedule.timeline import KIND_NAMES, Timeline


def to_json(timelines: Mapping[str, Timeline]) -> str:
  """Returns the trace: a process a timeline, a thread a device."""
  events = []
  for process, (title, timeline) in enumerate(timelines.items()):
    events.append(_name('process_name', process, 0, title))
    for device in sorted({s.device for s in timeline}):
      events.append(_name('thread_name', process, device, f'device {device}'))
    for span in timeline:
      action = span.action
      events.append(
        {
          'name': str(action),
          'cat': KIND_NAMES[action.kind],
          'ph': 'X',
          'pid': process,
          'tid': span.device,
          'ts': span.start * 1e6,
          'dur': (span.end - span.start) * 1e6,
          'args': {
            'stage': action.stage,
            'micro_batch': action.micro_batch,
            'arrived': span.arrived * 1e6,
          },
        }
      )
  return json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'})


def _name(what, process, thread, text):
  return {
    'name': what,
    'ph': 'M',
    'pid': process,
    'tid': thread,
    'args': {'name': text},
  }
