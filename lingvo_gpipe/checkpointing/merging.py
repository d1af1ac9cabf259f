"""Fewer steps that do the same.

    Backward(3, 4) Backward(1, 3)        ->  Backward(1, 4)
    Forward(1, 2, (2,), recorded=(1,))
    Backward(1, 4)                       ->  Backward(1, 4), which records 1
    Forward(0, 1, (1,)) Forward(1, 3)    ->  Forward(0, 3, (1,))

A step back holds the whole of its run at once, so the first two may cost
memory, or time if what a step has left is computed again: then they are not
done.
"""

from lingvo_gpipe.checkpointing.remat import (
  Backward,
  Chain,
  Forward,
  Remat,
  peak_bytes,
  recomputed,
)


def merged(chain: Chain, remat: Remat, in_flight: int) -> Remat:
  """Returns a plan of fewer steps, no dearer in memory, nothing more again.

  Args:
    chain: the layers.
    remat: the plan.
    in_flight: micro-batches that are held at a time.
  """
  num_layers = len(chain.forward)
  counts = recomputed(remat, num_layers)
  peak = peak_bytes(chain, remat, in_flight)

  def as_good(steps):
    candidate = Remat(remat.checkpoints, remat.recorded, tuple(steps))
    return (
      recomputed(candidate, num_layers) == counts
      and peak_bytes(chain, candidate, in_flight) <= peak
    )

  # Forwards last: a long one hides what a step back could record by itself.
  steps = list(remat.backward)
  for join in (_join_to_backward, _join_forwards):
    steps = _joined(steps, join, as_good)
  return Remat(remat.checkpoints, remat.recorded, tuple(steps))


def _joined(steps, join, as_good):
  position = 0
  while position + 1 < len(steps):
    step = join(steps[position], steps[position + 1])
    fewer = [*steps[:position], step, *steps[position + 2 :]]
    if step is not None and as_good(fewer):
      # The step before may be a neighbour now.
      steps = fewer
      position = max(position - 1, 0)
    else:
      position += 1
  return steps


def _join_to_backward(first, second):
  """Returns a Backward in place of two steps, None if they are no match."""
  if not isinstance(second, Backward):
    return None
  if isinstance(first, Backward):
    return Backward(second.start, first.stop)
  is_all_recorded = len(first.recorded) == first.stop - first.start
  if is_all_recorded and first.start == second.start:
    return second
  return None


def _join_forwards(first, second):
  """Returns a Forward in place of two, None if they are no match."""
  if isinstance(first, Backward) or isinstance(second, Backward):
    return None
  if first.stop != second.start:
    return None
  return Forward(
    first.start,
    second.stop,
    first.checkpoints + second.checkpoints,
    first.recorded + second.recorded,
  )
