"""Which tensor goes from where to where, across layers and stages.

Every tensor of the network is a numbered value with one maker. A layer that
only hands a tensor on does not make a new one, so a skip connection goes
straight from the stage that makes it to those that compute with it:

    stage 0            stage 1              stage 2
    makes 3, 4 ---3--> uses 3; makes 5 --5-> uses 5 and 4
            `--------------4----------------^

Gradients of a value that several stages use travel back from the last user to
the one before and so on to the maker, each adding its own. Sums then have one
order, whatever the cut: the losses are the same to the last bit.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.cost import LayerTrace

# The maker of a value that comes in from outside the network.
OUTSIDE = -1


@dataclasses.dataclass(frozen=True)
class Value:
  """A tensor of the network; `maker` is the index of a layer, or OUTSIDE."""

  spec: tf.TensorSpec
  maker: int

  @property
  def has_gradient(self) -> bool:
    return self.maker != OUTSIDE and self.spec.dtype.is_floating


@dataclasses.dataclass(frozen=True)
class LayerWiring:
  """The values that a layer takes and returns.

  Attributes:
    args: structure of its FProp arguments; leaves are value ids or None.
    used: ids of the arguments that it computes with.
    made: for each leaf of its outputs the id of the value that it makes, or
      None for a leaf that it hands on or that is None.
  """

  args: tuple
  used: frozenset[int]
  made: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class StageWiring:
  """What a stage exchanges with the others.

  Attributes:
    layers: range of the layers it holds.
    takes: ids of the values that come from other stages or from outside.
    gives: ids of the values that it makes for others or as network outputs.
    relays: those of `takes` that a later stage uses too: their gradient comes
      in from there, and leaves with this stage's share added.
    awaits: those of `gives` and `relays` whose gradient comes in.
  """

  layers: range
  takes: tuple[int, ...]
  gives: tuple[int, ...]
  relays: tuple[int, ...]
  awaits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Wiring:
  """All values of a network and the layers between them.

  Attributes:
    values: by id.
    inputs: ids of the leaves of the network's arguments, None for a None.
    layers: by position in the list.
    outputs: structure (a tuple) of the network's outputs; leaves are ids.
  """

  values: tuple[Value, ...]
  inputs: tuple[int | None, ...]
  layers: tuple[LayerWiring, ...]
  outputs: tuple

  def stage(self, layers: range) -> StageWiring:
    """Returns what the stage that holds `layers` exchanges with others."""
    used_here = _union(self.layers[l].used for l in layers)
    used_later = _union(l.used for l in self.layers[layers.stop :])
    returned = set(tf.nest.flatten(self.outputs)) - {None}

    def made_here(v):
      return self.values[v].maker in layers

    def awaited(v):
      return v in used_later and self.values[v].has_gradient

    takes = tuple(v for v in sorted(used_here) if not made_here(v))
    gives = tuple(v for v in sorted(used_later | returned) if made_here(v))
    relays = tuple(v for v in takes if awaited(v))
    return StageWiring(
      layers=layers,
      takes=takes,
      gives=gives,
      relays=relays,
      awaits=tuple(v for v in gives + relays if awaited(v)),
    )


class WiringBuilder:
  """Wires layer after layer: ask for `args`, trace the layer, `add` it."""

  def __init__(self, inputs: Any):
    """Starts a network whose first layer takes `inputs` (specs and Nones)."""
    self._values = []
    self._layers = []
    self._inputs = tuple(tf.nest.flatten(self._bring_in(inputs)))
    self._flowing = tf.nest.pack_sequence_as(inputs, self._inputs)

  def bring_in(self, extra: tuple) -> None:
    """Appends arguments from outside for the next layer, such as labels."""
    ids = self._bring_in(extra)
    self._inputs += tuple(tf.nest.flatten(ids))
    self._flowing += ids

  def args(self) -> tuple:
    """Returns the specs of the arguments of the next layer."""
    return tf.nest.map_structure(
      lambda v: None if v is None else self._values[v].spec, self._flowing
    )

  def add(self, trace: LayerTrace) -> None:
    """Puts the traced layer at the end of the list."""
    args = tf.nest.flatten(self._flowing)
    used = zip(args, trace.used_inputs, strict=True)
    made, returned = [], []
    for spec, passed in zip(
      tf.nest.flatten(trace.outputs), trace.passed_inputs, strict=True
    ):
      is_new = spec is not None and passed is None
      made.append(self._make(spec, len(self._layers)) if is_new else None)
      returned.append(made[-1] if passed is None else args[passed])
    self._layers.append(
      LayerWiring(
        args=self._flowing,
        used=frozenset(v for v, is_used in used if is_used),
        made=tuple(made),
      )
    )
    self._flowing = tf.nest.pack_sequence_as(trace.outputs, returned)

  def build(self) -> Wiring:
    return Wiring(
      values=tuple(self._values),
      inputs=self._inputs,
      layers=tuple(self._layers),
      outputs=self._flowing,
    )

  def _bring_in(self, specs):
    return tf.nest.map_structure(
      lambda s: None if s is None else self._make(s, OUTSIDE), specs
    )

  def _make(self, spec: tf.TensorSpec, maker: int) -> int:
    self._values.append(Value(tf.TensorSpec(spec.shape, spec.dtype), maker))
    return len(self._values) - 1


def _union(sets: Sequence[frozenset[int]]) -> set[int]:
  return set().union(*sets)
