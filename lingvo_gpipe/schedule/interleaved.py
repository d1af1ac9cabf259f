"""Interleaved 1F1B: V virtual stages a device (arXiv 2104.04473, section 2.2).

Device d of D holds the stages d, D + d, 2 D + d, ...: a micro-batch passes it V
times, and each wait of fill and drain is shorter by V. K = 4 stages on D = 2
devices, M = 4; a digit is the micro-batch, a backward takes two columns:

    device 0  01012.00311200311.22.332233     stages 0 and 2
    device 1  .010001112003112223332233..     stages 1 and 3

Work comes in groups of D micro-batches: a group passes the device's first
stage, then its second, and so on; backwards likewise, from the last stage to
the first. Device d does (V-1) D + 2 (D-d-1) forwards, then alternates. The
bubble is that of 1F1B over V; a micro-batch crosses devices V times as often.

The paper wants M to be a multiple of D. Here the groups of other M are as equal
as can be, and larger than D rather than smaller, which cannot deadlock.
"""

import itertools

from lingvo_gpipe.schedule import one_f_one_b
from lingvo_gpipe.schedule.action import BACKWARD, FORWARD, Action, Schedule


def interleaved(
  num_stages: int, num_micro_batches: int, virtual_stages: int
) -> Schedule:
  """Returns the interleaved schedule of K stages on K / V devices."""
  num_devices = num_stages // virtual_stages
  groups = _groups(num_micro_batches, num_devices)
  rounds = range(virtual_stages)

  def actions(device, kind, order):
    return [
      Action(v * num_devices + device, kind, i)
      for group in groups
      for v in order
      for i in group
    ]

  devices = []
  for d in range(num_devices):
    forwards = actions(d, FORWARD, rounds)
    backwards = actions(d, BACKWARD, rounds[::-1])
    warm_up = (virtual_stages - 1) * len(groups[0]) + 2 * (num_devices - d - 1)
    devices.append(
      one_f_one_b.alternate(forwards, backwards, min(warm_up, len(forwards)))
    )
  return tuple(devices)


def _groups(num_micro_batches, num_devices):
  """Returns ranges of at least `num_devices` micro-batches if there are any."""
  count = max(1, num_micro_batches // num_devices)
  size, larger = divmod(num_micro_batches, count)
  # The largest come first: they set how far the forwards run ahead.
  sizes = [size + 1] * larger + [size] * (count - larger)
  stops = [0, *itertools.accumulate(sizes)]
  return [range(a, b) for a, b in itertools.pairwise(stops)]
