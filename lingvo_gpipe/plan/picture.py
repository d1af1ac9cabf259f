"""Draws a plan: its stages as bars of time and of memory."""

from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import search

_TIME_COLOURS = {
  'forward': '#4c78a8',
  'backward': '#f58518',
  'forward again': '#9ecae9',
}
_BYTE_COLOURS = {
  'weights': '#4c78a8',
  'slots': '#72b7b2',
  'gradients': '#54a24b',
  'batch': '#bab0ac',
  'activations': '#f58518',
  'workspace': '#eeca3b',
}


def save(
  title: str, found: search.Found, machine: machine_lib.Machine, path: str
) -> None:
  """Draws into a PNG, SVG or PDF; the path's ending says which.

  Above, for each stage, seconds of one micro-batch; below, bytes at its peak
  and, where it is known, the memory of its device.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  stages = found.forecast.stages
  figure, (times, memory) = pyplot.subplots(
    2,
    1,
    figsize=(max(6.0, min(24.0, 2 + 0.4 * len(stages))), 6),
    sharex=True,
    layout='constrained',
  )
  figure.suptitle(title, fontsize=9)
  seconds = {
    'forward': [s.seconds['F'] for s in stages],
    'backward': [s.seconds['B'] - s.recompute_seconds for s in stages],
    'forward again': [s.recompute_seconds for s in stages],
  }
  _stack(times, seconds, _TIME_COLOURS)
  times.set_ylabel('seconds of a micro-batch')
  gibibytes = {
    kind: [s.bytes[kind] / 2**30 for s in stages] for kind in _BYTE_COLOURS
  }
  _stack(memory, gibibytes, _BYTE_COLOURS)
  memory.set_ylabel('GiB at the peak')
  memory.set_xlabel('stage')
  memory.xaxis.get_major_locator().set_params(integer=True)
  if machine.memory:
    for k, stage in enumerate(stages):
      limit = machine.memory_of(stage.device) / 2**30
      memory.hlines(limit, k - 0.45, k + 0.45, color='black', linewidth=1)
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def _stack(axes, parts, colours):
  numbers = range(len(next(iter(parts.values()))))
  base = [0.0] * len(numbers)
  for name, heights in parts.items():
    axes.bar(numbers, heights, bottom=base, color=colours[name], label=name)
    base = [b + h for b, h in zip(base, heights, strict=True)]
  axes.legend(
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=len(parts),
    frameon=False,
    fontsize=8,
  )
  axes.spines[['top', 'right']].set_visible(False)
