"""A timeline as text: a row a device, a column a unit of time.

device 0  0F0 0F1  .   .   .  0B0 --- 0B1 ---
device 1   .  1F0 1B0 --- 1F1 1B1 ---  .   .
"""

import math

from lingvo_gpipe.schedule.timeline import Timeline, makespan

# More columns than this help nobody.
_MAX_COLUMNS = 400


def to_text(timeline: Timeline) -> str:
  """Returns the grid; its unit divides all times, or as nearly as fits."""
  whole = makespan(timeline)
  ticks = [round(t * 1e6) for s in timeline for t in (s.start, s.end)]
  unit = max(math.gcd(*ticks) / 1e6, whole / _MAX_COLUMNS)
  columns = max(1, round(whole / unit))
  rows = [['.'] * columns for _ in range(1 + max(s.device for s in timeline))]
  for span in timeline:
    start = min(round(span.start / unit), columns - 1)
    end = max(round(span.end / unit), start + 1)
    row = rows[span.device]
    row[start:end] = [str(span.action)] + ['-'] * (end - start - 1)
  width = max(len(str(s.action)) for s in timeline)
  name_width = len(f'device {len(rows) - 1}')
  return ''.join(
    f'{f"device {d}":<{name_width}}  '
    + ' '.join(_cell(cell, width) for cell in row).rstrip()
    + '\n'
    for d, row in enumerate(rows)
  )


def _cell(text, width):
  return '-' * width if text == '-' else text.center(width)
