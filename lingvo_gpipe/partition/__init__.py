"""Where to cut the list of layers into stages."""

from lingvo_gpipe.partition.contiguous import (
  DoesNotFit,
  bottleneck,
  cut,
  cut_by,
  imbalance,
)

__all__ = ['DoesNotFit', 'bottleneck', 'cut', 'cut_by', 'imbalance']
