"""The stages of a plan, each with its functions."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from lingvo.core import base_layer

from lingvo_gpipe import randomness
from lingvo_gpipe.plan import plan as plan_lib
from lingvo_gpipe.stage import functions


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage, ready to run.

  Attributes:
    plan: its layers, wiring and device.
    names: of its layers.
    seeds: int64 [layers], one seed a layer.
    functions: shared by all stages of its structure.
  """

  plan: plan_lib.StagePlan
  names: tuple[str, ...]
  seeds: np.ndarray
  functions: functions.StageFunctions


def build_stages(
  plan: plan_lib.Plan,
  layers: Sequence[base_layer.BaseLayer],
  seed: int | None,
  batch_dim: int,
  loss_name: str | None,
  bits: str = 'philox',
) -> list[Stage]:
  """Builds the stages; those of equal structure share one set of functions.

  Args:
    plan: of the pipeline.
    layers: instances of the plan's layers, in its order.
    seed: of the run.
    batch_dim: the dimension that counts examples.
    loss_name: the metric to minimise if the last layer is a loss, else None.
    bits: where random bits come from (random_bits.py).
  """
  shared = {}
  stages = []
  for k, stage in enumerate(plan.stages):
    mine = [layers[l] for l in stage.layers]
    names = tuple(plan.names[l] for l in stage.layers)
    loss = loss_name if k == plan.num_stages - 1 else None
    key = (
      tuple(plan_lib.structure_key(layer.params) for layer in mine),
      _relative(plan.wiring, stage.wiring),
      loss,
    )
    if key not in shared:
      shared[key] = functions.StageFunctions(
        names, mine, plan.wiring, stage.wiring, batch_dim, loss, bits
      )
    seeds = [randomness.layer_seed(seed, name) for name in names]
    stages.append(
      Stage(
        plan=stage,
        names=names,
        seeds=np.array(seeds, np.int64),
        functions=shared[key],
      )
    )
  return stages


def _relative(network, wiring) -> str:
  """Describes a stage's wiring with values numbered as they come up."""
  numbers = {}

  def number(v):
    return None if v is None else numbers.setdefault(v, len(numbers))

  takes = [(number(v), network.values[v]) for v in wiring.takes]
  layers = [network.layers[l] for l in wiring.layers]
  return repr(
    (
      [(n, v.spec, v.has_gradient) for n, v in takes],
      [
        (
          tf.nest.map_structure(number, layer.args),
          sorted(number(v) for v in layer.used),
          [number(v) for v in layer.made],
        )
        for layer in layers
      ],
      [
        [number(v) for v in ids]
        for ids in (wiring.gives, wiring.relays, wiring.awaits)
      ],
    )
  )
