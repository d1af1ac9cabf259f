"""1F1B: a backward as soon as there is one (arXiv 1806.03377, section 3.2).

K = 4, M = 8; a digit is the micro-batch, a backward takes two columns:

    stage 0  0123......00411522633744.55.66.77
    stage 1  .012....00311422533644755.66.77..
    stage 2  ..01..00211322433544655766.77....
    stage 3  ...000111222333444555666777......

Stage k does K - k forwards, then alternates. The bubble is fill-drain's, but at
most K - k micro-batches are in flight on stage k, however many there are.
"""

from lingvo_gpipe.schedule.action import BACKWARD, FORWARD, Action, Schedule


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
  """Returns the 1F1B schedule of K stages on K devices."""
  devices = []
  for k in range(num_stages):
    forwards = [Action(k, FORWARD, i) for i in range(num_micro_batches)]
    backwards = [Action(k, BACKWARD, i) for i in range(num_micro_batches)]
    warm_up = min(num_stages - k - 1, num_micro_batches)
    devices.append(alternate(forwards, backwards, warm_up))
  return tuple(devices)


def alternate(
  forwards: list[Action], backwards: list[Action], warm_up: int
) -> tuple[Action, ...]:
  """Returns `warm_up` forwards, then one and one, then the backwards left."""
  order = forwards[:warm_up]
  for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
    order += [forward, backward]
  return tuple(order + backwards[len(forwards) - warm_up :])
