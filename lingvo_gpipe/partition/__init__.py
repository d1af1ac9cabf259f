"""Where to cut the list of layers into stages."""

from lingvo_gpipe.partition.contiguous import cut

__all__ = ['cut']
