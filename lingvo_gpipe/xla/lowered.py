"""A training step as StableHLO, with where each array is to be."""

import dataclasses

import tensorflow as tf

from lingvo_gpipe.engine import spmd


@dataclasses.dataclass(frozen=True)
class Lowered:
  """What a compiler takes.

  Attributes:
    code: StableHLO, serialized.
    mesh: the cores.
    state: entries of the arrays that the step replaces; first among arguments
      and results.
    batch: entries of the other arguments.
    metrics: names of the other results, float32 scalars.
  """

  code: bytes
  mesh: spmd.Mesh
  state: tuple[spmd.Entry, ...]
  batch: tuple[spmd.Entry, ...]
  metrics: tuple[str, ...]


def lower(program: spmd.Program) -> Lowered:
  """Traces the step and translates it; allocates nothing."""
  step = tf.function(program.run, jit_compile=True, autograph=False)
  specs = [entry.spec for entry in program.arguments]
  # For a TPU TensorFlow refuses where it has none; the code is the same.
  code = step.experimental_get_compiler_ir(*specs)(
    stage='stablehlo_serialized', platform_name='CPU'
  )
  state = tuple(program.step.state)
  return Lowered(
    code=code,
    mesh=program.mesh,
    state=state,
    batch=tuple(program.arguments[len(state) :]),
    metrics=tuple(program.step.scalars),
  )
