"""What a stage keeps for its backward pass, and what it computes again.

Imports no TensorFlow.
"""

from lingvo_gpipe.checkpointing.optimal import cheapest
from lingvo_gpipe.checkpointing.remat import (
  Backward,
  Chain,
  Forward,
  Remat,
  keep_all,
  keep_inputs,
  kept_bytes,
  peak_bytes,
  recomputed,
)
from lingvo_gpipe.checkpointing.revolve import revolve

__all__ = [
  'Backward',
  'Chain',
  'Forward',
  'Remat',
  'cheapest',
  'keep_all',
  'keep_inputs',
  'kept_bytes',
  'peak_bytes',
  'recomputed',
  'revolve',
]
