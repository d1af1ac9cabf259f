"""An array of the state on a TPU slice: a variable for each core's part.

    "stages/qkv" [4, 2, 16, 48]  ->  on each of four cores  [1, 2, 16, 48]

Variables of tf.distribute.TPUStrategy would be whole on every core.
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import tpu_util
from tensorflow.python.ops import gen_tpu_partition_ops

from lingvo_gpipe.engine.spmd import layout
from lingvo_gpipe.engine.spmd import mesh as mesh_lib


class SlicedVariable:
  """One array, to be read and assigned as a whole inside the program.

  Attributes:
    parts: the variable of each core.
  """

  def __init__(
    self,
    mesh: mesh_lib.Mesh,
    entry: layout.Entry,
    value: np.ndarray,
    devices: Sequence[str],
  ):
    """Puts each core's part of `value` on its device.

    Args:
      mesh: the cores.
      entry: of the array; split over stages alone, if at all.
      value: the whole array.
      devices: of the cores.
    """
    self._mesh = mesh
    self._entry = entry
    self.parts = []
    for core, device in enumerate(devices):
      with tf.device(device):
        self.parts.append(tf.Variable(value[self._part(core)], trainable=False))

  def read(self) -> tf.Tensor:
    """Returns the whole array, inside the program."""
    if self._mesh.num_cores == 1:
      return self.parts[0].read_value()
    return tf.raw_ops.ReadVariableOp(
      resource=self._handle(), dtype=self._entry.spec.dtype
    )

  def assign(self, value: tf.Tensor) -> None:
    """Assigns the whole array, inside the program."""
    if self._mesh.num_cores == 1:
      self.parts[0].assign(value)
    else:
      tf.raw_ops.AssignVariableOp(resource=self._handle(), value=value)

  def numpy(self) -> np.ndarray:
    """Returns the whole array, outside of the program."""
    value = np.zeros(
      self._entry.spec.shape, self._entry.spec.dtype.as_numpy_dtype
    )
    for core, variable in enumerate(self.parts):
      value[self._part(core)] = variable.numpy()
    return value

  def _part(self, core):
    """Returns where in the array the part of a core is."""
    stage = core // self._mesh.num_replicas
    parts = []
    for axis, size in zip(
      self._entry.split, self._entry.spec.shape, strict=True
    ):
      width = size
      if axis == mesh_lib.STAGE:
        width = size // self._mesh.num_stages
      start = stage * width if axis == mesh_lib.STAGE else 0
      parts.append(slice(start, start + width))
    return tuple(parts)

  def _handle(self):
    """Returns what stands for all parts inside the program."""
    tiles = [
      self._mesh.num_stages if axis == mesh_lib.STAGE else 1
      for axis in self._entry.split
    ]
    # One more dimension than the array has: that of equal copies.
    copies = self._mesh.num_cores // math.prod(tiles)
    if copies == self._mesh.num_cores:
      tiles = []
    elif copies > 1:
      tiles.append(copies)
    with tpu_util.outside_or_skip_tpu_context():
      handle = gen_tpu_partition_ops.tpu_partitioned_input_v2(
        [variable.handle for variable in self.parts],
        partition_dims=tiles,
        is_packed=False,
      )
    return self._mesh.mark(handle, self._entry.split)
