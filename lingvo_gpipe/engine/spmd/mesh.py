"""The cores of one SPMD program: stages in a ring, times replicas.

              replica 0   replica 1
    stage 0    core 0      core 1      a tensor is split along some of its
    stage 1    core 2      core 3      dimensions: (STAGE, None, REPLICA) has
    stage 2    core 4      core 5      each stage hold its slice of dimension 0,
                                       each replica its slice of dimension 2

Outside of a region XLA sees whole tensors and decides itself how the cores work
on them. Inside of one, a core sees its own slices and runs ordinary code.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding

# Axes of the mesh; a Split names one, or None, for each dimension of a tensor.
STAGE, REPLICA = 0, 1
Split = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Mesh:
  """num_stages x num_replicas cores; stage by stage, the replicas of each."""

  num_stages: int
  num_replicas: int = 1

  @property
  def num_cores(self) -> int:
    return self.num_stages * self.num_replicas

  @property
  def _ids(self):
    return np.arange(self.num_cores).reshape(self.num_stages, -1)

  def split(self, tensor: tf.Tensor, split: Split) -> tf.Tensor:
    """Tells XLA which core is to hold which part of a tensor."""
    if self.num_cores == 1:
      return tensor
    if not _is_split(split):
      return xla_sharding.replicate(tensor, use_sharding_op=True)
    return xla_sharding.mesh_split(
      tensor, self._ids, _dims(split), use_sharding_op=True
    )

  def mark(self, tensor: tf.Tensor, split: Split) -> tf.Tensor:
    """Notes at the op of a tensor which core has which part of it."""
    return self._sharding(split).apply_to_tensor(tensor)

  def region(
    self,
    function: Callable,
    arguments: Sequence[tuple[tf.Tensor, Split]],
    splits: Sequence[Split],
  ) -> list[tf.Tensor]:
    """Lets each core run a function on its own slices.

    Args:
      function: of as many tensors as there are arguments; returns a list.
      arguments: whole tensors, and how each is split.
      splits: how each result is.

    Returns:
      The results, as whole tensors.
    """
    slices = [self._to_core(*argument) for argument in arguments]
    results = function(*slices)
    return [
      self._from_core(result, split)
      for result, split in zip(results, splits, strict=True)
    ]

  def text(self, split: Split) -> str:
    """Returns a split in the notation of XLA's `mhlo.sharding`."""
    if self.num_cores == 1 or not _is_split(split):
      return '{replicated}'
    sizes = self._ids.shape
    tiles = [1 if axis is None else sizes[axis] for axis in split]
    used = [axis for axis in split if axis is not None]
    rest = [axis for axis in (STAGE, REPLICA) if axis not in used]
    ids = ','.join(map(str, self._ids.transpose(used + rest).flatten()))
    if rest:
      tiles.append(self.num_cores // int(np.prod(tiles)))
    tiles = ','.join(map(str, tiles))
    suffix = ' last_tile_dim_replicate' if rest else ''
    return f'{{devices=[{tiles}]{ids}{suffix}}}'

  def _to_core(self, tensor, split):
    if self.num_cores == 1:
      return tensor
    return xla_sharding.auto_to_manual_spmd_partition(
      tensor, self._serialized(split)
    )

  def _from_core(self, tensor, split):
    if self.num_cores == 1:
      return tensor
    sizes = self._ids.shape
    whole = [
      size if axis is None else size * sizes[axis]
      for size, axis in zip(tensor.shape, split, strict=True)
    ]
    return xla_sharding.manual_to_auto_spmd_partition(
      tensor, self._serialized(split), whole
    )

  def _serialized(self, split):
    return self._sharding(split).proto.SerializeToString()

  def _sharding(self, split):
    if _is_split(split):
      return xla_sharding.mesh_split_sharding(self._ids, _dims(split))
    return xla_sharding.Sharding.replicate()


def by_stage(rank: int) -> Split:
  """Returns the split of an array [stages, ...] of this rank."""
  return (STAGE, *[None] * (rank - 1))


def _is_split(split):
  return any(axis is not None for axis in split)


def _dims(split):
  return [-1 if axis is None else axis for axis in split]
