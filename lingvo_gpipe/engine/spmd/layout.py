"""The state of a run as arrays: which there are, and which core has what.

A weight of the run of equal layers is one array, [stages, layers a core, ...];
each stage has its slice. A weight of a layer before or after the run is split
along its last dimension that the stages divide.

    block_000/qkv ... block_007/qkv   ->   "stages/qkv"        [4, 2, 16, 48]
    embedding/table                   ->   "embedding/table"   [256, 16]
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.engine.spmd import mesh as mesh_lib
from lingvo_gpipe.engine.spmd.mesh import STAGE


@dataclasses.dataclass(frozen=True)
class Entry:
  """One array.

  Attributes:
    name: of the weight or slot, as in "stages/qkv" or "stages/qkv/Adam".
    spec: shape and type of the whole array.
    split: over the cores.
  """

  name: str
  spec: tf.TensorSpec
  split: mesh_lib.Split


def stacked(
  name: str, spec: tf.TensorSpec, num_stages: int, layers_per_core: int
) -> Entry:
  """Returns the entry of a weight that each of the equal layers has."""
  shape = [num_stages, layers_per_core, *spec.shape]
  split = mesh_lib.by_stage(len(shape))
  return Entry(name, tf.TensorSpec(shape, spec.dtype), split)


def spread(name: str, spec: tf.TensorSpec, num_stages: int) -> Entry:
  """Returns the entry of a weight outside of the stages."""
  split = [None] * spec.shape.rank
  for dim in reversed(range(spec.shape.rank)):
    if spec.shape[dim] % num_stages == 0:
      split[dim] = STAGE
      break
  return Entry(name, spec, tuple(split))


def whole(name: str, spec: tf.TensorSpec) -> Entry:
  """Returns the entry of an array that every core has."""
  return Entry(name, spec, (None,) * spec.shape.rank)


def like(entry: Entry, name: str) -> Entry:
  """Returns the entry of a slot of a weight."""
  return dataclasses.replace(entry, name=f'{entry.name}/{name}')


def split_all(
  mesh: mesh_lib.Mesh, entries: Sequence[Entry], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Tells XLA of each tensor how it is split."""
  return [
    mesh.split(tensor, entry.split)
    for entry, tensor in zip(entries, tensors, strict=True)
  ]
