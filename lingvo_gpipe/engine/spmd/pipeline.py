"""The pipeline as loops of ticks: all cores run one program, each its stage.

    tick        0   1   2   3   4   5        K = 3 cores, M = 4 micro-batches
    core 0      0   1   2   3   .   .        numbers: which one a core runs
    core 1      .   0   1   2   3   .        .: a bubble; its loop over layers
    core 2      .   .   0   1   2   3           turns no times

After a tick every core hands its result to the next. With V circuits a core
holds V stages, and what core K - 1 made comes back to core 0, where it waits
for the M micro-batches of this circuit to have gone in (GSPMD, arXiv
2105.04663, section 3.3). Backward is the same, in a mirror. A work item j is
micro-batch j % M on its circuit j // M.

Forward keeps the inputs of every stage, or of every segment of its layers;
backward computes the inputs of the other layers again, and the inside of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe.engine.spmd import chain, loops
from lingvo_gpipe.engine.spmd import core as core_lib
from lingvo_gpipe.engine.spmd import mesh as mesh_lib
from lingvo_gpipe.engine.spmd import rooms as rooms_lib
from lingvo_gpipe.engine.spmd.mesh import REPLICA, STAGE

Tensors = Sequence[tf.Tensor]


class Weights(NamedTuple):
  """What the layers of a pipeline are made with.

  Attributes:
    theta: each [stages, layers a core, ...].
    seeds: int64 [stages, layers a core].
    step: int64 scalar, the global step.
    one: float32 1.0 that the compiler does not know; see Core.
  """

  theta: Tensors
  seeds: tf.Tensor
  step: tf.Tensor
  one: tf.Tensor


class Pipeline:
  """Runs all micro-batches through all stages, and back.

  What goes from stage to stage is a list of values; here each is described by
  its spec for one micro-batch, [examples, ...].
  """

  def __init__(
    self,
    shape: core_lib.Shape,
    layer: core_lib.StageLayer,
    specs: Sequence[tf.TensorSpec],
  ):
    self._shape = shape
    self._mesh = shape.mesh
    self._layer = layer
    self._rooms = rooms_lib.Rooms(shape, specs)
    self._specs = list(specs)
    self._float_specs = [s for s in specs if s.dtype.is_floating]

  def forward(
    self, weights: Weights, kept: Tensors, results: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Runs all micro-batches through all stages.

    Args:
      weights: of all layers.
      kept: with what goes into the first stage.
      results: room for what comes out of the last.

    Returns:
      (kept, results).
    """
    num_values = len(self._specs)

    def tick(t, *tensors):
      arrived, rest = tensors[:num_values], tensors[num_values:]
      kept, results = loops.halves(rest)
      made = self._on_cores(
        self._forward_tick, t, weights, arrived, kept, results
      )
      handed_on = [
        self._mesh.split(_to_next(value), self._rooms.flow_split(value))
        for value in made[:num_values]
      ]
      return [*handed_on, *made[num_values:]]

    start = [*self._rooms.no_flow(self._specs), *kept, *results]
    done = loops.loop(self._shape.num_ticks, tick, start)
    return loops.halves(done[num_values:])

  def backward(
    self, weights: Weights, kept: Tensors, results: Tensors
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Runs all micro-batches back through all stages.

    Args:
      weights: of all layers.
      kept: what forward kept.
      results: in the place of floats that the last stage made, their gradients.

    Returns:
      (kept, with the gradients of what went into the first stage in its place;
      gradients of all weights, summed over the micro-batches).
    """
    num_values = len(self._float_specs)
    num_kept = len(kept)
    results = chain.floats(results)
    sums = [self._rooms.no_sum(w) for w in weights.theta]

    def tick(t, *tensors):
      arrived, rest = tensors[:num_values], tensors[num_values:]
      kept, rest = rest[:num_kept], rest[num_kept:]
      results, sums = rest[:num_values], rest[num_values:]
      made = self._on_cores(
        self._backward_tick, t, weights, arrived, kept, results, sums
      )
      handed_on = [
        self._mesh.split(_to_previous(value), self._rooms.flow_split(value))
        for value in made[:num_values]
      ]
      return [*handed_on, *made[num_values:]]

    start = [*self._rooms.no_flow(self._float_specs), *kept, *results, *sums]
    done = loops.loop(self._shape.num_ticks, tick, start)[num_values:]
    sums = done[num_kept + num_values :]
    gradients = [
      self._mesh.split(tf.reduce_sum(s, 1), mesh_lib.by_stage(s.shape.rank - 1))
      for s in sums
    ]
    return list(done[:num_kept]), gradients

  def _on_cores(self, tick, t, weights, arrived, kept, results, sums=()):
    """Runs a tick in a region; returns all but the weights, changed."""
    groups = (arrived, kept, results, sums)
    splits = [
      [self._rooms.flow_split(v) for v in arrived],
      self._rooms.kept_splits(self._specs),
      [self._rooms.result_split(v) for v in results],
      [(STAGE, REPLICA, *[None] * (s.shape.rank - 2)) for s in sums],
    ]
    theta = [(w, mesh_lib.by_stage(w.shape.rank)) for w in weights.theta]
    sizes = [len(theta), *map(len, groups)]

    def on_core(core, t, step, one, seeds, *tensors):
      theta, arrived, kept, results, sums = _cut(tensors, sizes)
      here = core_lib.Core(
        self._shape,
        self._layer,
        core[0, 0, 0],
        core[0, 0, 1],
        [w[0] for w in theta],
        seeds[0],
        step,
        one,
      )
      arrived, kept, results = (
        [v[0] for v in group] for group in (arrived, kept, results)
      )
      sums = [s[0, 0] for s in sums]
      made = tick(here, t, arrived, kept, results, sums)
      flat = [value[None] for group in made[:3] for value in group]
      return flat + [s[None, None] for s in made[3]]

    arguments = [
      self._rooms.cores(),
      (t, ()),
      (weights.step, ()),
      (weights.one, ()),
      (weights.seeds, (STAGE, None)),
      *theta,
    ]
    for group, of_group in zip(groups, splits, strict=True):
      arguments += zip(group, of_group, strict=True)
    return self._mesh.region(
      on_core, arguments, [split for of_group in splits for split in of_group]
    )

  def _forward_tick(self, here, t, arrived, kept, results, unused_sums):
    shape = self._shape
    M, last = shape.num_micro_batches, self._mesh.num_stages - 1
    item = t - here.stage
    # What core 0 gets from the last one is for a later circuit.
    slot = tf.where(tf.equal(here.stage, 0), item - last - 1 + M, item)
    begins = tf.where(tf.equal(here.stage, 0), slot >= M, slot >= 0)
    is_meant = tf.logical_and(begins, slot < shape.num_items)
    slot = _within(slot, shape.num_items)
    zero = tf.constant(0)
    kept = [
      loops.put_if(is_meant, room, value, slot, zero)
      for room, value in zip(kept, arrived, strict=True)
    ]
    runs = tf.logical_and(item >= 0, item < shape.num_items)
    item = _within(item, shape.num_items)
    made, kept = here.forward(runs, item, kept)
    is_result = tf.logical_and(
      tf.equal(here.stage, last), here.circuit(item) == shape.num_circuits - 1
    )
    results = [
      loops.put_if(tf.logical_and(runs, is_result), room, value, item % M)
      for room, value in zip(results, made, strict=True)
    ]
    return made, kept, results, []

  def _backward_tick(self, here, t, arrived, kept, results, sums):
    shape = self._shape
    M, last = shape.num_micro_batches, self._mesh.num_stages - 1
    item = shape.num_items - 1 + last - t - here.stage
    is_last = tf.equal(here.stage, last)
    # What the last core gets from core 0 is for an earlier circuit.
    came_from = item + last + 1
    waits = tf.logical_and(came_from >= M, came_from < shape.num_items)
    results = [
      loops.put_if(tf.logical_and(is_last, waits), room, value, came_from % M)
      for room, value in zip(results, arrived, strict=True)
    ]
    runs = tf.logical_and(item >= 0, item < shape.num_items)
    item = _within(item, shape.num_items)
    cotangents = [
      tf.where(is_last, loops.take(room, item % M), value)
      for room, value in zip(results, arrived, strict=True)
    ]
    made, sums = here.backward(runs, item, kept, cotangents, sums)
    # Nobody needs what went into the first stage any more.
    is_first = tf.logical_and(
      tf.equal(here.stage, 0), tf.equal(here.circuit(item), 0)
    )
    replaces = tf.logical_and(runs, is_first)
    gradients = iter(made)
    zero = tf.constant(0)
    kept = [
      loops.put_if(replaces, room, next(gradients), item, zero)
      if room.dtype.is_floating
      else room
      for room in kept
    ]
    return made, kept, results, sums


def _to_next(value):
  """Core k's slice goes to core k + 1, that of the last to the first."""
  # Written so, not as tf.roll, XLA sees that cores send to their neighbours.
  return tf.concat([value[-1:], value[:-1]], 0)


def _to_previous(value):
  return tf.concat([value[1:], value[:1]], 0)


def _within(index, size):
  return tf.clip_by_value(index, 0, size - 1)


def _cut(tensors, sizes):
  groups, start = [], 0
  for size in sizes:
    groups.append(list(tensors[start : start + size]))
    start += size
  return groups
