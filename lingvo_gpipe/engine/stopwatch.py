"""Notes, inside the graph of a step, when each action arrived, began and ended.

    inputs --> identity --> [arrived]
                                  \\
    action before it -----------> [start] --> the call --> [end] --> next action

A timestamp is a scalar op with control edges, a few microseconds each. The
graph of a step that is not timed has none of them.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.schedule import timeline as timeline_lib
from lingvo_gpipe.schedule.action import Action


class Stopwatch:
  """The timestamps of one step, by action."""

  def __init__(self):
    self._stamps = {}

  def start(
    self,
    action: Action,
    waits_for: Sequence[tf.Tensor],
    before: tf.Operation | None,
  ) -> tf.Operation:
    """Returns an op that runs when `action` may begin, and notes when.

    Args:
      action: that is about to be added to the graph.
      waits_for: what it takes from other actions.
      before: what the device does before it, if anything.
    """
    here = [tf.identity(tensor).op for tensor in waits_for]
    before = [] if before is None else [before]
    arrived = self._stamp(action, 'arrived', here)
    return self._stamp(action, 'start', [arrived, *before])

  def recomputed(
    self, action: Action, before: tf.Operation, op: tf.Operation
  ) -> None:
    """Notes when `op`, a recomputation that followed `before`, ran."""
    number = len(self._stamps[action])
    self._stamp(action, f'recomputes_{number}', [before])
    self._stamp(action, f'recomputed_{number}', [op])

  def end(self, action: Action, op: tf.Operation) -> tf.Operation:
    """Returns an op that runs after `op`, and notes when."""
    return self._stamp(action, 'end', [op])

  def _stamp(self, action, what, after):
    with tf.control_dependencies(after):
      stamp = tf.timestamp(name=f'{what}_{action}')
    self._stamps.setdefault(action, {})[what] = stamp
    return stamp.op

  def actions(self) -> list[Action]:
    """Returns all actions, in the order of the rows of `times`."""
    return list(self._stamps)

  def times(self) -> tf.Tensor:
    """Returns float64 [actions, 4]: arrived, start, recomputed, end.

    In seconds since 1970; recomputed is start and the time of recomputing.
    """
    return tf.stack([_row(stamps) for stamps in self._stamps.values()])


def _row(stamps):
  recomputed = stamps['start']
  for what, stamp in stamps.items():
    if what.startswith('recomputed_'):
      recomputed += stamp
    elif what.startswith('recomputes_'):
      recomputed -= stamp
  return tf.stack(
    [stamps['arrived'], stamps['start'], recomputed, stamps['end']]
  )


def to_timeline(
  actions: Sequence[Action],
  times: Sequence[Sequence[float]],
  schedule: schedule_lib.Schedule,
) -> timeline_lib.Timeline:
  """Returns the timeline of a timed step; its first start is at 0.

  Args:
    actions: from `Stopwatch.actions`.
    times: the value of `Stopwatch.times`.
    schedule: that ran.
  """
  device_of = schedule_lib.placement(schedule)
  first = min(start for _, start, _, _ in times)
  spans = []
  for action, row in zip(actions, times, strict=True):
    arrived, start, recomputed, end = (float(t - first) for t in row)
    device = device_of[action.stage]
    if recomputed > start:
      again = action._replace(kind=timeline_lib.RECOMPUTE)
      spans.append(timeline_lib.Span(again, device, arrived, start, recomputed))
    spans.append(timeline_lib.Span(action, device, arrived, recomputed, end))
  return tuple(spans)
