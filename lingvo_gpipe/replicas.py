"""Copies of a pipeline that share a mini-batch and one set of variables.

    mini-batch    [0 1 2 3 4 5 | 6 7 8 9 10]        R = 2, two stages
    replica 0      devices 0, 1 -- sums of gradients --.
    replica 1      devices 2, 3 -- sums of gradients --+-- one update
                        '------- new values -----------'

Variables are on the devices of the first replica, or spread over those of all.
The gradients of a stage are added up, where its variables are, as soon as the
replicas have them; no stage waits for another.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import micro_batches
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe import stage as stage_lib
from lingvo_gpipe.engine import mpmd
from lingvo_gpipe.engine import stopwatch as stopwatch_lib
from lingvo_gpipe.stage import calls

# The values of each micro-batch by id.
Values = list[dict[int, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Replica:
  """One copy of the pipeline.

  Attributes:
    plan: for its share of the mini-batch and its devices.
    stages: built for the plan; all replicas share their functions.
    first_example: index in the mini-batch of the first of its examples.
    batch_dim: the dimension that counts examples.
  """

  plan: plan_lib.Plan
  stages: Sequence[stage_lib.Stage]
  first_example: int
  batch_dim: int

  def run(
    self,
    schedule: schedule_lib.Schedule,
    theta: py_utils.NestedMap,
    leaves: Sequence[Any],
    step: tf.Tensor,
    stopwatch: stopwatch_lib.Stopwatch | None = None,
  ) -> mpmd.Results:
    """Runs the replica's share of a mini-batch.

    Args:
      schedule: the plan's own, or its forwards.
      theta: weights of the layers by name, wherever they are.
      leaves: the arguments of the network, flat, for the replica's examples.
      step: int64 scalar, the global step.
      stopwatch: to note when each action runs.
    """
    return mpmd.run(
      schedule,
      self.plan,
      self.stages,
      self._read(theta),
      self._split(leaves),
      step,
      stopwatch,
      self.first_example,
    )

  def run_differentiably(
    self, theta: py_utils.NestedMap, leaves: Sequence[Any], step: tf.Tensor
  ) -> Values:
    """Runs all forwards so that TensorFlow can differentiate through them."""
    return mpmd.run_differentiably(
      self.plan,
      self.stages,
      self._read(theta),
      self._split(leaves),
      step,
      self.first_example,
    )

  def outputs(self, values: Values) -> list[tuple]:
    """Returns what the network gives for each micro-batch."""
    return [_take(self.plan.wiring.outputs, v) for v in values]

  def _split(self, leaves) -> Values:
    """Splits arguments into micro-batches where they are used first."""
    plan = self.plan
    users = {
      v: stage.device
      for stage in reversed(plan.stages)
      for v in stage.wiring.takes
    }
    values = [{} for _ in plan.micro_batch_sizes]
    for v, leaf in zip(plan.wiring.inputs, leaves, strict=True):
      if v is not None:
        with tf.device(users.get(v, plan.stages[-1].device)):
          parts = micro_batches.split(
            leaf, plan.micro_batch_sizes, self.batch_dim
          )
        for of_micro_batch, part in zip(values, parts, strict=True):
          of_micro_batch[v] = part
    return values

  def _read(self, theta) -> list[list[tf.Tensor]]:
    """Reads the weights of each stage, to its device, as a flat list."""
    by_stage = []
    for stage in self.plan.stages:
      with tf.device(stage.device):
        by_stage.append(
          [
            leaf.read_value() if isinstance(leaf, tf.Variable) else leaf
            for l in stage.layers
            for leaf in theta[self.plan.names[l]].Flatten()
          ]
        )
    return by_stage


def make_replicas(
  plans: Sequence[plan_lib.Plan],
  stages: Sequence[stage_lib.Stage],
  batch_dim: int,
) -> list[Replica]:
  """Returns a Replica for each plan, which differ in devices and sizes.

  Args:
    plans: of the replicas, in the order of their examples.
    stages: built for any of the plans.
    batch_dim: the dimension that counts examples.
  """
  made, first_example = [], 0
  for plan in plans:
    moved = [
      dataclasses.replace(stage, plan=planned)
      for stage, planned in zip(stages, plan.stages, strict=True)
    ]
    made.append(Replica(plan, moved, first_example, batch_dim))
    first_example += sum(plan.micro_batch_sizes)
  return made


def split(
  replicas: Sequence[Replica], leaves: Sequence[Any]
) -> list[list[Any]]:
  """Returns the arguments of each replica, from those of the network.

  Args:
    replicas: that share the mini-batch.
    leaves: the arguments of the network, flat, for the whole mini-batch.
  """
  if len(replicas) == 1:
    return [list(leaves)]
  shares = [sum(r.plan.micro_batch_sizes) for r in replicas]
  parts = [
    [None] * len(shares)
    if leaf is None
    else micro_batches.split(leaf, shares, replicas[0].batch_dim)
    for leaf in leaves
  ]
  return [list(of_replica) for of_replica in zip(*parts, strict=True)]


def combine_metrics(
  replicas: Sequence[Replica], results: Sequence[mpmd.Results]
) -> py_utils.NestedMap:
  """Returns the metrics of the mini-batch, each (average, weight).

  Args:
    replicas: that share it.
    results: of each.
  """
  metrics = [
    outputs[0]
    for replica, result in zip(replicas, results, strict=True)
    for outputs in replica.outputs(result.values)
  ]
  with tf.device(replicas[0].plan.stages[-1].device):
    return _weighted_average(metrics)


def average_gradients(
  replicas: Sequence[Replica],
  results: Sequence[mpmd.Results],
  homes: Mapping[str, str],
  factor: tf.Tensor,
) -> list[py_utils.NestedMap]:
  """Returns the gradients of each layer, where its variables are.

  Replicas are added in their order, on whichever device: the bits do not
  depend on where.

  Args:
    replicas: that share the mini-batch.
    results: of each. Their sums are used up: added to in place.
    homes: the device of each layer's variables, by name of the layer.
    factor: scalar to multiply the sums by.
  """
  gradients = []
  for k, stage in enumerate(replicas[0].stages):
    of_stage = [of_replica.gradients[k] for of_replica in results]
    averages = {}
    for home, weights in _by_home(stage, homes).items():
      sums = [[of_replica[j] for j in weights] for of_replica in of_stage]
      with tf.device(home):
        total = functools.reduce(stage.functions.accumulate, sums)
        scaled = stage.functions.scale(total, factor)
      averages.update(zip(weights, scaled, strict=True))
    gradients += stage.functions.pack_gradients(
      [averages[j] for j in range(len(averages))]
    )
  return gradients


def _by_home(stage, homes):
  """Returns which of a stage's trained weights are on each device."""
  by_home, start = {}, 0
  for name, count in zip(
    stage.names, stage.functions.trained_by_layer, strict=True
  ):
    if count:
      by_home.setdefault(homes[name], []).extend(range(start, start + count))
    start += count
  return by_home


class Homes:
  """Chooses the device of each layer's variables.

  The first replica's, or of all replicas' the one that has the fewest bytes:

    bytes of layers   4 4 4 2 4
          replica 0   4   4
          replica 1     4   2 4
  """

  def __init__(self, devices: Sequence[Sequence[str]], spread: bool):
    """Sets up.

    Args:
      devices: of each replica.
      spread: whether to use more than the first replica's.
    """
    self._devices = devices if spread else devices[:1]
    self._bytes = dict.fromkeys((d for of in devices for d in of), 0)
    self._counted = set()

  def choose(self, position: int) -> str:
    """Returns the device for a layer.

    Args:
      position: of the layer's device in a replica.
    """
    candidates = [of_replica[position] for of_replica in self._devices]
    return min(candidates, key=self._bytes.__getitem__)

  def add(self, device: str, variables: Sequence[tf.Variable]) -> None:
    """Notes the variables of a layer that has been built.

    Those tied to earlier ones are where these are, and counted already.
    """
    for v in variables:
      if v.ref() not in self._counted:
        self._counted.add(v.ref())
        self._bytes[device] += v.shape.num_elements() * v.dtype.size


@calls.out_of_line
def _weighted_average(metrics: Sequence[py_utils.NestedMap]):
  """Joins the metrics of micro-batches into those of the mini-batch."""
  joined = py_utils.NestedMap()
  for name in metrics[0]:
    weighted, weight = 0.0, 0.0
    for m in metrics:
      part = tf.cast(m[name][1], tf.float32)
      weighted += tf.cast(m[name][0], tf.float32) * part
      weight += part
    joined[name] = (tf.math.divide_no_nan(weighted, weight), weight)
  return joined


def _take(structure, values):
  """Replaces value ids in `structure` by the tensors of one micro-batch."""
  return tf.nest.map_structure(
    lambda v: None if v is None else values[v], structure
  )
