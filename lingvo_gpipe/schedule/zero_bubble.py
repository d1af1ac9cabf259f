"""Zero bubble: weight gradients fill the waits (arXiv 2401.10241, section 2).

The gradient of the inputs (I) is what the stage before waits for; that of the
weights (W) has time. With F, I and W of equal length, K = 4, M = 8:

zb1p holds as much as 1F1B does on its first stage. Stage k lags k W's behind:

    stage 0  FFFF...IWFIWFIWFIWFIWIWIWIW
    stage 1  .FFF..IFIWFIWFIWFIWFIWIWIWW
    stage 2  ..FF.IFIFIWFIWFIWFIWFIWIWWW     bubble: a third of 1F1B's
    stage 3  ...FIFIFIFIWFIWFIWFIWFIWWWW

zb2p holds twice as much and fills the waits of the start with forwards:

    stage 0  FFFFFFFIWFIWIWIWIWIWIWIW...
    stage 1  .FFFFFIFIFIWFIWIWIWIWIWWW..
    stage 2  ..FFFIFIFIFIFIWFIWIWIWWWWW.     no wait between a stage's first
    stage 3  ...FIFIFIFIFIFIFIWFIWWWWWWW     and last action
"""

from lingvo_gpipe.schedule.action import (
  FORWARD,
  INPUT_GRADIENT,
  WEIGHT_GRADIENT,
  Action,
  Schedule,
)


def zb1p(num_stages: int, num_micro_batches: int) -> Schedule:
  """Returns ZB-H1: at most K micro-batches in flight on a stage."""
  return tuple(
    _stage(k, num_micro_batches, warm_up=num_stages - k, lag=k)
    for k in range(num_stages)
  )


def zb2p(num_stages: int, num_micro_batches: int) -> Schedule:
  """Returns ZB-H2: at most 2 K - 1 micro-batches in flight on a stage."""
  return tuple(
    _stage(k, num_micro_batches, warm_up=2 * (num_stages - k) - 1, lag=2 * k)
    for k in range(num_stages)
  )


def _stage(k, num_micro_batches, warm_up, lag):
  """Returns `warm_up` F, then I W F in turn, each W `lag` behind its I."""
  order = [
    Action(k, FORWARD, i) for i in range(min(warm_up, num_micro_batches))
  ]
  for i in range(num_micro_batches + lag):
    if i < num_micro_batches:
      order.append(Action(k, INPUT_GRADIENT, i))
    if i >= lag:
      order.append(Action(k, WEIGHT_GRADIENT, i - lag))
    if i + warm_up < num_micro_batches:
      order.append(Action(k, FORWARD, i + warm_up))
  return tuple(order)
