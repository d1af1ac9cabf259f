"""Which activations are kept for the backward pass, and which recomputed.

none          every stage keeps all of every micro-batch
full          every stage keeps its input alone and recomputes the rest
except_last   like full, but where backward follows forward at once nothing
              is recomputed: in the whole last stage, and for the last
              micro-batch, with which the drain begins
"""

REMAT_MODES = ('none', 'full', 'except_last')


def keeps_activations(
  remat: str, k: int, i: int, num_stages: int, num_micro_batches: int
) -> bool:
  """Returns whether stage k keeps the activations of micro-batch i."""
  if remat == 'except_last':
    return k == num_stages - 1 or i == num_micro_batches - 1
  return remat == 'none'
