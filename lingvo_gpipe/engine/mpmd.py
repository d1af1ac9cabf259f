"""Runs a schedule inside one tf.function: an op placement per stage.

The schedule is unrolled: each action becomes one call on its stage's device,
with a control edge from the action before it on that device. TensorFlow's
runtime does the transfers. The edges make a device do one thing at a time and
in the order of the schedule, which is what bounds its memory.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import plan as plan_lib
from lingvo_gpipe.schedule import action as action_lib
from lingvo_gpipe.stage import Stage
from lingvo_gpipe.stage import functions as stage_functions


@dataclasses.dataclass
class Results:
  """What a schedule leaves behind.

  Attributes:
    values: for each micro-batch, value id -> tensor.
    gradients: for each stage, gradients of its trained weights, summed over
      micro-batches: of the sum over examples, not of the average.
  """

  values: list[dict[int, tf.Tensor]]
  gradients: list[list[tf.Tensor]]


def run(
  schedule: schedule_lib.Schedule,
  plan: plan_lib.Plan,
  stages: Sequence[Stage],
  thetas: Sequence[Sequence[tf.Tensor]],
  micro_batches: Sequence[dict[int, tf.Tensor]],
  step: tf.Tensor,
) -> Results:
  """Runs `schedule` on one mini-batch.

  Args:
    schedule: the actions of each device.
    plan: of the pipeline.
    stages: built for the plan.
    thetas: the flat weights of each stage.
    micro_batches: for each, value id -> tensor of the network's inputs.
    step: int64 scalar, the global step.
  """
  runner = _Runner(plan, stages, thetas, micro_batches, step)
  for action in schedule_lib.global_order(schedule, plan.num_stages):
    with runner.turn_of(action.stage):
      if action.kind == action_lib.FORWARD:
        runner.forward(action.stage, action.micro_batch)
      else:
        runner.backward(action.stage, action.micro_batch)
  return Results(runner.values, runner.gradients)


class _Runner:
  """The tensors in flight while a schedule is unrolled."""

  def __init__(self, plan, stages, thetas, micro_batches, step):
    self._plan = plan
    self._stages = stages
    self._thetas = thetas
    self._step = step
    # Made before any action, outside of the order of a device.
    self._seeds = [tf.constant(stage.seeds) for stage in stages]
    starts = [0, *itertools.accumulate(plan.micro_batch_sizes)]
    self._starts = [tf.constant(start, tf.int64) for start in starts[:-1]]
    self._kept = {}
    self._cotangents = collections.defaultdict(dict)
    self._last_ops = {}
    self.values = [dict(values) for values in micro_batches]
    self.gradients = [None] * len(stages)

  @contextlib.contextmanager
  def turn_of(self, k):
    """Everything inside runs on stage k's device after what ran there last."""
    graph = tf.compat.v1.get_default_graph()
    num_ops_before = len(graph.get_operations())
    device = self._stages[k].plan.device
    before = self._last_ops.get(device)
    with tf.device(device), tf.control_dependencies([before] if before else []):
      yield
    _free_from_program_order(graph, graph.get_operations()[num_ops_before:])

  def forward(self, k, i):
    stage, theta = self._stages[k], self._thetas[k]
    inputs = [self.values[i][v] for v in stage.plan.wiring.takes]
    call = theta, inputs, self._rng(k, i), self._plan.micro_batch_sizes[i]
    if self._plan.keeps_activations(k, i):
      outputs, tape = stage.functions.record(*call)
      self._kept[k, i] = outputs, tape
    else:
      outputs = stage.functions.forward(*call)
    self._ran(k, outputs)
    # Relays are outputs for the sake of their gradients alone: the values
    # themselves go straight from their maker to their users.
    self.values[i].update(zip(stage.plan.wiring.gives, outputs, strict=False))

  def forward_differentiably(self, k, i):
    stage = self._stages[k]
    wiring = stage.plan.wiring
    rng, size = self._rng(k, i), self._plan.micro_batch_sizes[i]
    num_weights = len(self._thetas[k])

    def forward(*flat):
      theta, inputs = flat[:num_weights], flat[num_weights:]
      return stage.functions.forward(theta, inputs, rng, size)

    if not self._plan.keeps_activations(k, i):
      forward = tf.recompute_grad(forward)
    inputs = [self.values[i][v] for v in wiring.takes]
    outputs = forward(*self._thetas[k], *inputs)
    self._ran(k, outputs)
    # Later stages take the relayed values from here, so that TensorFlow sends
    # gradients back the way that `backward` does.
    values = zip(wiring.gives + wiring.relays, outputs, strict=True)
    self.values[i].update(values)

  def backward(self, k, i):
    stage, theta = self._stages[k], self._thetas[k]
    wiring = stage.plan.wiring
    inputs = [self.values[i][v] for v in wiring.takes]
    cotangents = [self._cotangents[i].pop(v) for v in wiring.awaits]
    if self.gradients[k] is None:
      self.gradients[k] = stage.functions.zeros()
    if (k, i) in self._kept:
      outputs, tape = self._kept.pop((k, i))
      dinputs, gradients = stage.functions.replay(
        tape, theta, inputs, outputs, cotangents
      )
      gradients = stage.functions.accumulate(self.gradients[k], gradients)
    else:
      dinputs, gradients = stage.functions.backward(
        theta,
        inputs,
        self._rng(k, i),
        self._plan.micro_batch_sizes[i],
        cotangents,
        self.gradients[k],
      )
    self._ran(k, gradients or dinputs)
    self.gradients[k] = gradients
    values = self._plan.wiring.values
    differentiable = [v for v in wiring.takes if values[v].has_gradient]
    self._cotangents[i].update(zip(differentiable, dinputs, strict=True))

  def _rng(self, k, i):
    return stage_functions.Rng(self._seeds[k], self._step, self._starts[i])

  def _ran(self, k, outputs):
    """Notes the op that the next action on the device waits for."""
    if outputs and not tf.executing_eagerly():
      self._last_ops[self._stages[k].plan.device] = outputs[0].op


def _free_from_program_order(graph, ops):
  """Lets calls with side effects overlap those on other devices.

  tf.function runs such ops one after the other in the order of the program;
  the schedule has an order of its own.
  """
  for op in ops:
    if op.type == 'StatefulPartitionedCall':
      graph.experimental_acd_manager.run_independently(op)


def run_differentiably(
  plan: plan_lib.Plan,
  stages: Sequence[Stage],
  thetas: Sequence[Sequence[tf.Tensor]],
  micro_batches: Sequence[dict[int, tf.Tensor]],
  step: tf.Tensor,
) -> list[dict[int, tf.Tensor]]:
  """Runs all forwards so that TensorFlow can differentiate through them.

  Arguments as for `run`; returns the values of each micro-batch.
  """
  runner = _Runner(plan, stages, thetas, micro_batches, step)
  schedule = schedule_lib.forward_only(plan.num_stages, plan.num_micro_batches)
  for action in schedule_lib.global_order(schedule, plan.num_stages):
    with runner.turn_of(action.stage):
      runner.forward_differentiably(action.stage, action.micro_batch)
  return runner.values
