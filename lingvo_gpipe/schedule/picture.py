"""Draws timelines: a row a device, a colour a kind, a number a micro-batch."""

from collections.abc import Mapping

from lingvo_gpipe.schedule.timeline import (
  KIND_NAMES,
  Timeline,
  bubble,
  makespan,
)

_COLOURS = {
  'F': '#4c78a8',
  'B': '#f58518',
  'I': '#f58518',
  'W': '#54a24b',
  'U': '#b279a2',
  'R': '#9ecae9',
}
# Numbers are written where an action is at least this share of the width.
_LABELLED_SHARE = 1 / 120


def save(timelines: Mapping[str, Timeline], path: str, unit: str = '') -> None:
  """Draws one timeline under another into a PNG, SVG or PDF.

  Args:
    timelines: by title.
    path: its ending says which format.
    unit: of the times, for the axis.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import patches, pyplot

  num_devices = [1 + max(s.device for s in t) for t in timelines.values()]
  figure, all_axes = pyplot.subplots(
    len(timelines),
    squeeze=False,
    sharex=True,
    figsize=(16, sum(num_devices) * 0.35 + 1.2 * len(timelines)),
    layout='constrained',
  )
  for axes, (title, timeline) in zip(
    all_axes[:, 0], timelines.items(), strict=True
  ):
    _draw(axes, timeline, max(map(makespan, timelines.values())))
    axes.set_title(f'{title}: bubble {bubble(timeline):.1%}', loc='left')
  axes.set_xlabel(f'time [{unit}]' if unit else 'time')
  kinds = {s.action.kind for t in timelines.values() for s in t}
  all_axes[0, 0].legend(
    handles=[
      patches.Patch(color=_COLOURS[kind], label=KIND_NAMES[kind])
      for kind in _COLOURS
      if kind in kinds
    ],
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=len(kinds),
    frameon=False,
  )
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def _draw(axes, timeline, whole):
  first = min(s.start for s in timeline)
  num_devices = 1 + max(s.device for s in timeline)
  for span in timeline:
    width = span.end - span.start
    # A device's later stages are paler.
    turn = span.action.stage // num_devices
    axes.barh(
      span.device,
      width,
      left=span.start - first,
      height=0.9,
      color=_COLOURS[span.action.kind],
      alpha=1 if turn == 0 else 0.6,
      edgecolor='white',
      linewidth=0.3,
    )
    if width >= whole * _LABELLED_SHARE:
      axes.text(
        span.start - first + width / 2,
        span.device,
        str(span.action.micro_batch),
        ha='center',
        va='center',
        fontsize=7,
        color='white',
      )
  axes.set_yticks(
    range(num_devices), [f'device {d}' for d in range(num_devices)]
  )
  axes.invert_yaxis()
  axes.set_xlim(0, whole)
  axes.spines[['top', 'right', 'left']].set_visible(False)
