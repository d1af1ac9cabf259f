"""A stage as a chain of layers, and what it keeps and computes again, as data.

Between F and B of a micro-batch a stage holds what the plan lets F keep: inputs
of some layers (checkpoints), and all that the backward of some layers needs
(recorded). B then goes back in steps, each from an input that is held:

    layer      0     1     2     3     4        held
    F        ----> ----> o---> ----> ====>      inputs 0, 2; 4 is recorded
    B                                <====      Backward(4, 5)
                         ====> ====>            Backward(2, 4): records its
                         <==== <====               layers, then goes back
             ----> o                            Forward(0, 1), checkpoint 1
                   ====>
                   <====                        Backward(1, 2)
             ====>
             <====                              Backward(0, 1)

Bytes are counted so: a checkpoint is the layer's input, a recorded layer its
input and its internals. A step back holds all layers of its run, the greatest
workspace among them, and what is held of layers before; what belongs to its
layers is free when it is done.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Chain:
  """The layers of a stage; times in any unit, sizes in bytes.

  Attributes:
    forward: time of a forward of each layer.
    boundary: bytes of what crosses into each layer; those of the first are the
      inputs of the stage, which are kept from F to B.
    internal: bytes that the backward of each layer needs beyond its input.
    workspace: bytes that the backward of each takes beside that.
  """

  forward: tuple[float, ...]
  boundary: tuple[int, ...]
  internal: tuple[int, ...]
  workspace: tuple[int, ...]


class Forward(NamedTuple):
  """A step of B: runs layers start to stop - 1 again, from an input held.

  Attributes:
    start: first layer.
    stop: one more than the last.
    checkpoints: layers whose inputs it keeps, start < l <= stop.
    recorded: layers whose internals it keeps.
  """

  start: int
  stop: int
  checkpoints: tuple[int, ...]
  recorded: tuple[int, ...]


class Backward(NamedTuple):
  """A step of B: gradients of layers stop - 1 to start.

  What it needs of them and nobody kept is computed first, for all of the run.
  """

  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Remat:
  """What a stage keeps and computes again; layers counted from its first.

  Attributes:
    checkpoints: layers, beside the first, whose inputs F keeps.
    recorded: layers whose internals F keeps.
    backward: the steps of B, whose Backwards cover all layers, last to first.
  """

  checkpoints: tuple[int, ...]
  recorded: tuple[int, ...]
  backward: tuple[Forward | Backward, ...]


def keep_all(num_layers: int) -> Remat:
  """Returns the plan that computes nothing again."""
  return Remat((), tuple(range(num_layers)), (Backward(0, num_layers),))


def keep_inputs(num_layers: int) -> Remat:
  """Returns the plan that keeps the inputs of the stage alone."""
  return Remat((), (), (Backward(0, num_layers),))


def recomputed(remat: Remat, num_layers: int) -> tuple[int, ...]:
  """Returns for each layer how many more forwards it has than one."""
  counts = [0] * num_layers
  held = set(remat.recorded)
  for step in remat.backward:
    run = range(step.start, step.stop)
    for l in run:
      if isinstance(step, Forward) or l not in held:
        counts[l] += 1
    if isinstance(step, Forward):
      held.update(step.recorded)
  return tuple(counts)


def kept_bytes(chain: Chain, remat: Remat) -> int:
  """Returns what F leaves for B, of one micro-batch."""
  inputs = {0, *remat.checkpoints, *remat.recorded}
  return _held(chain, inputs, remat.recorded)


def peak_bytes(chain: Chain, remat: Remat, in_flight: int) -> int:
  """Returns the most that the stage holds while it runs B of a micro-batch.

  Args:
    chain: the layers.
    remat: the plan.
    in_flight: micro-batches between F and B, this one included.
  """
  inputs = {0, *remat.checkpoints, *remat.recorded}
  recorded = set(remat.recorded)
  most = now = _held(chain, inputs, recorded)
  others = (in_flight - 1) * now
  for step in remat.backward:
    if isinstance(step, Forward):
      inputs.update(step.checkpoints, step.recorded)
      recorded.update(step.recorded)
      now = _held(chain, inputs, recorded)
    else:
      run = range(step.start, step.stop)
      inputs = {l for l in inputs if l < step.start}
      recorded = {l for l in recorded if l < step.start}
      now = _held(chain, inputs, recorded) + _held(chain, run, run)
      now += max(chain.workspace[step.start : step.stop])
    most = max(most, now)
  return others + most


def _held(chain: Chain, inputs: Iterable[int], recorded: Iterable[int]) -> int:
  # A checkpoint behind the last layer is the output of the stage.
  num_layers = len(chain.boundary)
  return sum(chain.boundary[l] for l in inputs if l < num_layers) + sum(
    chain.internal[l] for l in recorded
  )
