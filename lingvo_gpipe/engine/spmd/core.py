"""What one core does in a tick: its stage, layer after layer, and back.

kept      x0 . . x3 . .      the inputs of the segments of a stage (here 2
forward   -> -> -> -> -> ->  of 3 layers); backward computes those of the
backward           <- <- <-  other layers again, segment by segment, and
          <- <- <-           the inside of each layer
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from lingvo_gpipe.engine.spmd import loops
from lingvo_gpipe.engine.spmd import mesh as mesh_lib
from lingvo_gpipe.stage import functions


@dataclasses.dataclass(frozen=True)
class Shape:
  """The sizes of a pipeline.

  Attributes:
    mesh: its cores.
    num_circuits: V, stages on each core.
    layers_per_stage: equal layers in a stage.
    layers_per_segment: how many of them keep one input between them.
    num_micro_batches: M.
    micro_batch_size: examples in a micro-batch, of all replicas together.
  """

  mesh: mesh_lib.Mesh
  num_circuits: int
  layers_per_stage: int
  layers_per_segment: int
  num_micro_batches: int
  micro_batch_size: int

  @property
  def layers_per_core(self) -> int:
    return self.num_circuits * self.layers_per_stage

  @property
  def num_segments(self) -> int:
    return self.layers_per_stage // self.layers_per_segment

  @property
  def num_items(self) -> int:
    return self.num_circuits * self.num_micro_batches

  @property
  def num_ticks(self) -> int:
    return self.num_items + self.mesh.num_stages - 1


class StageLayer(NamedTuple):
  """The layer of which all stages are made.

  Attributes:
    forward: (core, theta, values, rng) -> values; core is the number of the
      core in the ring, theta the weights of one layer.
    vjp: (core, theta, values, rng, cotangents) -> (gradients of the values
      that are floats, gradients of theta).
  """

  forward: Callable
  vjp: Callable


class Core:
  """A core in a region, with its own slices of everything."""

  def __init__(self, shape, layer, stage, replica, theta, seeds, step, one):
    self._shape = shape
    self._layer = layer
    self.stage = stage
    self._replica = replica
    self._theta = theta
    self._seeds = seeds
    self._step = step
    self._one = one

  def circuit(self, item):
    return item // self._shape.num_micro_batches

  def forward(self, runs, item, kept):
    """Runs a stage; keeps what goes into each segment.

    Returns:
      (what comes out, kept).
    """
    shape = self._shape
    num_values = len(kept)
    rng = self._rng(item)

    def run_segment(segment, *tensors):
      values, kept = loops.halves(tensors)
      kept = [
        loops.put(room, value, item, segment)
        for room, value in zip(kept, values, strict=True)
      ]
      first = segment * shape.layers_per_segment

      def run_layer(l, *values):
        return self._layer.forward(
          self.stage, *self._at(item, first + l, rng, values)
        )

      values = loops.loop(shape.layers_per_segment, run_layer, values)
      return [*values, *kept]

    zero = tf.constant(0)
    values = [loops.take(room, item, zero) for room in kept]
    count = tf.where(runs, shape.num_segments, 0)
    done = loops.loop(count, run_segment, [*values, *kept])
    return done[:num_values], done[num_values:]

  def backward(self, runs, item, kept, cotangents, sums):
    """Takes a stage back.

    Returns:
      (gradients of what went in, sums with those of the weights added).
    """
    shape = self._shape
    num_values = len(cotangents)
    rng = self._rng(item)
    size = shape.layers_per_segment

    def back_segment(turn, *tensors):
      segment = shape.num_segments - 1 - turn
      first = segment * size
      inputs = [loops.take(room, item, segment) for room in kept]
      rooms = [
        loops.put(
          tf.zeros([size, *value.shape], value.dtype), value, tf.constant(0)
        )
        for value in inputs
      ]

      def run_layer(l, *values_and_rooms):
        values, rooms = loops.halves(values_and_rooms)
        values = self._layer.forward(
          self.stage, *self._at(item, first + l, rng, values)
        )
        rooms = [
          loops.put(room, value, l + 1)
          for room, value in zip(rooms, values, strict=True)
        ]
        return [*values, *rooms]

      if size > 1:
        done = loops.loop(size - 1, run_layer, [*inputs, *rooms])
        rooms = done[len(inputs) :]

      def back_layer(turn, *tensors):
        cotangents, sums = tensors[:num_values], tensors[num_values:]
        l = size - 1 - turn
        values = [loops.take(room, l) for room in rooms]
        dvalues, dtheta = self._layer.vjp(
          self.stage, *self._at(item, first + l, rng, values), cotangents
        )
        place = self._place(item, first + l)
        sums = [
          loops.put(s, loops.take(s, place) + tf.cast(d, s.dtype), place)
          for s, d in zip(sums, dtheta, strict=True)
        ]
        return [*dvalues, *sums]

      return loops.loop(size, back_layer, tensors)

    count = tf.where(runs, shape.num_segments, 0)
    done = loops.loop(count, back_segment, [*cotangents, *sums])
    return done[:num_values], done[num_values:]

  def _place(self, item, l):
    """Returns where a layer of the stage is among those of the core."""
    return self.circuit(item) * self._shape.layers_per_stage + l

  def _at(self, item, l, rng, values):
    """Returns theta, values and rng for a layer of the stage."""
    place = self._place(item, l)
    # The product keeps XLA from casting all layers to bfloat16 before the loop,
    # and keeping them; it cannot know that the factor is 1.
    theta = [loops.take(w, place) * self._one for w in self._theta]
    seeds = loops.take(self._seeds, place)[None]
    return theta, values, rng._replace(seeds=seeds)

  def _rng(self, item):
    shape = self._shape
    i = tf.cast(item % shape.num_micro_batches, tf.int64)
    share = shape.micro_batch_size // shape.mesh.num_replicas
    replica = tf.cast(self._replica, tf.int64)
    first_example = i * shape.micro_batch_size + replica * share
    return functions.Rng(None, self._step, first_example)
