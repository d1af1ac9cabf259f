"""Room for what goes through a pipeline, and who has which part of it.

    kept[value]     [stages, items, segments, examples, ...]
    results[value]  [stages, micro-batches, examples, ...]; those of the last
    flow[value]     [stages, examples, ...]: from stage to stage after a tick

Every core has its own part; the first cores read what comes in, the last have
what comes out.
"""

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe.engine.spmd import chain, loops
from lingvo_gpipe.engine.spmd import core as core_lib
from lingvo_gpipe.engine.spmd.mesh import REPLICA, STAGE, Split

Tensors = Sequence[tf.Tensor]


class Rooms:
  """Makes, reads and writes arrays of one pipeline."""

  def __init__(self, shape: core_lib.Shape, specs: Sequence[tf.TensorSpec]):
    """Sets up for values of these specs, [examples, ...] for a micro-batch."""
    self._shape = shape
    self._mesh = shape.mesh
    self._specs = list(specs)
    self._float_specs = [s for s in specs if s.dtype.is_floating]

  def empty(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns room for what forward keeps, and for its results."""
    shape = self._shape
    kept = self._room(self._specs, shape.num_items, shape.num_segments)
    return kept, self._room(self._specs, shape.num_micro_batches)

  def bring_in(
    self, kept: Tensors, i: tf.Tensor, values: Tensors
  ) -> list[tf.Tensor]:
    """Returns `kept` with the values of micro-batch i for the first stage."""
    return self._write(0, kept, self.kept_splits(self._specs), i, values)

  def write_result(
    self, results: Tensors, i: tf.Tensor, values: Tensors
  ) -> list[tf.Tensor]:
    """Returns `results` with these values for micro-batch i."""
    splits = [self.result_split(t) for t in results]
    return self._write(self._mesh.num_stages - 1, results, splits, i, values)

  def read_result(self, results: Tensors, i: tf.Tensor) -> list[tf.Tensor]:
    """Returns what the last stage made of micro-batch i, on all cores."""
    splits = [self.result_split(t) for t in results]
    return self._read(self._mesh.num_stages - 1, results, splits, i)

  def read_input_gradient(self, kept: Tensors, i: tf.Tensor) -> list[tf.Tensor]:
    """Returns the gradients of the first stage's inputs, on all cores."""
    splits = self.kept_splits(self._float_specs)
    return self._read(0, chain.floats(kept), splits, i)

  def _write(self, stage, rooms, splits, i, values):
    """Writes to the row of micro-batch i, on the cores of one stage."""

    def write(core, i, *tensors):
      rooms, values = loops.halves(tensors)
      is_it = tf.equal(core[0, 0, 0], stage)
      return [
        loops.put_if(is_it, room[0], value, *_row(i, room, value))[None]
        for room, value in zip(rooms, values, strict=True)
      ]

    by_replica = [(v, (REPLICA, *[None] * (v.shape.rank - 1))) for v in values]
    return self._mesh.region(
      write,
      [self.cores(), (i, ()), *zip(rooms, splits, strict=True), *by_replica],
      splits,
    )

  def _read(self, stage, rooms, splits, i):
    """Reads the row of micro-batch i, from the cores of one stage."""

    def read(core, i, *rooms):
      is_it = tf.equal(core[0, 0, 0], stage)
      found = [
        loops.take(room[0], *_row(i, room, value))
        for room, value in zip(rooms, like, strict=True)
      ]
      return [tf.where(is_it, t, tf.zeros_like(t))[None] for t in found]

    like = self._specs if len(rooms) == len(self._specs) else self._float_specs
    found = self._mesh.region(
      read,
      [self.cores(), (i, ()), *zip(rooms, splits, strict=True)],
      [(STAGE, REPLICA, *[None] * (s.shape.rank - 1)) for s in like],
    )
    # All but one are zero.
    return [tf.reduce_sum(t, 0) for t in found]

  def cores(self) -> tuple[tf.Tensor, Split]:
    """Returns an argument that tells a core its stage and its replica."""
    grid = tf.stack(
      tf.meshgrid(
        tf.range(self._mesh.num_stages),
        tf.range(self._mesh.num_replicas),
        indexing='ij',
      ),
      -1,
    )
    # [stages, replicas, 2]; each core sees its own row, [1, 1, 2].
    grid = self._mesh.split(grid, (STAGE, REPLICA, None))
    return grid, (STAGE, REPLICA, None)

  def _room(self, specs, *counts):
    return [
      self._mesh.split(
        tf.zeros([self._mesh.num_stages, *counts, *s.shape], s.dtype),
        (STAGE, *[None] * len(counts), REPLICA, *[None] * (s.shape.rank - 1)),
      )
      for s in specs
    ]

  def no_flow(self, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Returns what arrives before anybody has sent something."""
    return self._room(specs)

  def no_sum(self, weight: tf.Tensor) -> tf.Tensor:
    """Returns zeros [stages, replicas, layers a core, ...] for a gradient."""
    shape = [weight.shape[0], self._mesh.num_replicas, *weight.shape[1:]]
    split = (STAGE, REPLICA, *[None] * (len(shape) - 2))
    return self._mesh.split(tf.zeros(shape, weight.dtype), split)

  def kept_splits(self, specs: Sequence[tf.TensorSpec]) -> list[Split]:
    return [
      (STAGE, None, None, REPLICA, *[None] * (s.shape.rank - 1)) for s in specs
    ]

  def result_split(self, room: tf.Tensor) -> Split:
    return (STAGE, None, REPLICA, *[None] * (room.shape.rank - 3))

  def flow_split(self, value: tf.Tensor) -> Split:
    return (STAGE, REPLICA, *[None] * (value.shape.rank - 2))


def _row(i, room, value):
  """Returns where micro-batch i is: items may have several segments."""
  return [i] + [tf.constant(0)] * (room.shape.rank - value.shape.rank - 2)
