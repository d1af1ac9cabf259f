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

from lingvo_gpipe import errors
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.engine import program_order
from lingvo_gpipe.engine import stopwatch as stopwatch_lib
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
  stopwatch: stopwatch_lib.Stopwatch | None = None,
  first_example: int = 0,
) -> Results:
  """Runs `schedule` on one mini-batch.

  Gradients are summed over micro-batches from the first to the last, in
  whatever order the schedule makes them.

  Args:
    schedule: verified; the actions of each device.
    plan: of the pipeline.
    stages: built for the plan.
    thetas: the flat weights of each stage.
    micro_batches: for each, value id -> tensor of the network's inputs.
    step: int64 scalar, the global step.
    stopwatch: to note when each action runs; None to note nothing.
    first_example: index in the mini-batch of the first example here: not 0
      where others run what comes before.

  Raises:
    UserError: the schedule updates weights, or slices the sequence.
  """
  actions = schedule_lib.global_order(schedule, plan.num_stages)
  trains = any(action.kind != action_lib.FORWARD for action in actions)
  runner = _Runner(
    plan, stages, thetas, micro_batches, step, first_example, trains, stopwatch
  )
  for action in actions:
    runner.run(action)
  return Results(runner.values, runner.gradients)


class _Runner:
  """The tensors in flight while a schedule is unrolled."""

  def __init__(
    self,
    plan,
    stages,
    thetas,
    micro_batches,
    step,
    first_example,
    trains=False,
    stopwatch=None,
  ):
    self._plan = plan
    self._stages = stages
    self._thetas = thetas
    self._step = step
    self._trains = trains
    self._stopwatch = stopwatch
    # Made before any action, outside of the order of a device.
    self._seeds = [tf.constant(stage.seeds) for stage in stages]
    starts = [
      *itertools.accumulate(plan.micro_batch_sizes, initial=first_example)
    ]
    self._starts = [tf.constant(start, tf.int64) for start in starts[:-1]]
    self._known = {}
    self._cotangents = collections.defaultdict(dict)
    self._last_ops = program_order.start_of_devices(
      [stage.plan.device for stage in stages]
    )
    self._next_to_sum = [0] * len(stages)
    self._early = collections.defaultdict(dict)
    self.gradients = [None] * len(stages)
    self.values = [dict(values) for values in micro_batches]

  def run(self, action):
    """Adds one action to the graph."""
    runners = {
      action_lib.FORWARD: self._forward,
      action_lib.BACKWARD: self._backward,
      action_lib.INPUT_GRADIENT: self._input_gradient,
      action_lib.WEIGHT_GRADIENT: self._weight_gradient,
    }
    if action.kind not in runners or action.slice or action.version:
      raise errors.UserError(
        f'The schedule has {action}; the mpmd engine runs F, B, I and W of '
        'whole sequences with one version of the weights, and updates them '
        'after the step.'
      )
    runners[action.kind](action)

  @contextlib.contextmanager
  def _turn_of(self, action, waits_for):
    """Everything inside runs on the stage's device after what ran there last.

    Args:
      action: whose turn it is.
      waits_for: tensors that come from other actions.
    """
    graph = tf.compat.v1.get_default_graph()
    num_ops_before = len(graph.get_operations())
    device = self._stages[action.stage].plan.device
    with tf.device(device):
      if self._stopwatch:
        before = self._last_ops.get(device)
        start = self._stopwatch.start(action, waits_for, before)
        self._last_ops[device] = start
      before = self._last_ops.get(device)
      with tf.control_dependencies([before] if before is not None else []):
        yield
      if self._stopwatch:
        end = self._stopwatch.end(action, self._last_ops[device])
        self._last_ops[device] = end
    program_order.free(graph, graph.get_operations()[num_ops_before:])

  def _forward(self, action):
    k, i = action.stage, action.micro_batch
    stage = self._stages[k]
    with self._turn_of(action, self._inputs(k, i)):
      if not self._trains:
        outputs = stage.functions.run_forward(*self._call(k, i))
      else:
        step, known = self._start(k, i)
        outputs = step.forward(known, self._plan.remat_of(k, i))
        self._known[k, i] = known
      self._ran(k, outputs)
    # Relays are outputs for the sake of their gradients alone: the values
    # themselves go straight from their maker to their users.
    self.values[i].update(zip(stage.plan.wiring.gives, outputs, strict=False))

  def run_differentiably(self, action):
    """Adds a forward that TensorFlow can differentiate."""
    k, i = action.stage, action.micro_batch
    stage = self._stages[k]
    wiring = stage.plan.wiring
    theta, inputs, rng, size = self._call(k, i)
    num_weights = len(theta)

    def forward(*flat):
      theta, inputs = flat[:num_weights], flat[num_weights:]
      return stage.functions.forward(theta, inputs, rng, size)

    if not self._plan.remat_of(k, i).recorded:
      forward = tf.recompute_grad(forward)
    with self._turn_of(action, inputs):
      outputs = forward(*theta, *inputs)
      self._ran(k, outputs)
    # Later stages take the relayed values from here, so that TensorFlow sends
    # gradients back the way that `backward` does.
    values = zip(wiring.gives + wiring.relays, outputs, strict=True)
    self.values[i].update(values)

  def _backward(self, action):
    k, i = action.stage, action.micro_batch
    step, known, cotangents = self._way_back(k, i)
    with self._turn_of(action, [*self._inputs(k, i), *cotangents]):
      sums = self._sums_for(k, i)
      self._call_in_order(
        action, step.backward(known, cotangents, sums, *self._how(k, i))
      )
      self._sum(k, i, step.sums(known))
    self._send_back(k, i, step.dinputs(known))

  def _input_gradient(self, action):
    k, i = action.stage, action.micro_batch
    step, known, cotangents = self._way_back(k, i)
    with self._turn_of(action, [*self._inputs(k, i), *cotangents]):
      self._call_in_order(
        action, step.input_gradient(known, cotangents, *self._how(k, i))
      )
    self._known[k, i] = known
    if step.sends_back:
      self._send_back(k, i, step.dinputs(known))

  def _weight_gradient(self, action):
    k, i = action.stage, action.micro_batch
    step = self._stages[k].functions.step(*self._call(k, i))
    known = self._known.pop((k, i))
    with self._turn_of(action, []):
      sums = self._sums_for(k, i)
      self._call_in_order(
        action, step.weight_gradient(known, sums, *self._how(k, i))
      )
      self._sum(k, i, step.sums(known))

  def _how(self, k, i):
    """Returns the remat plan, and whether recomputing is to be timed."""
    return self._plan.remat_of(k, i), self._stopwatch is not None

  def _call_in_order(self, action, calls):
    """Makes the calls of an action, each after the one before."""
    device = self._stages[action.stage].plan.device
    for call in calls:
      before = self._last_ops.get(device)
      with tf.control_dependencies([before] if before is not None else []):
        results = call.run()
      self._ran(action.stage, results)
      if self._stopwatch and call.is_recompute:
        self._stopwatch.recomputed(action, before, results[0].op)

  def _inputs(self, k, i):
    takes = self._stages[k].plan.wiring.takes
    return [self.values[i][v] for v in takes]

  def _call(self, k, i):
    """Returns theta, inputs, rng and number of examples of a forward."""
    rng = stage_functions.Rng(self._seeds[k], self._step, self._starts[i])
    num_examples = self._plan.micro_batch_sizes[i]
    return self._thetas[k], self._inputs(k, i), rng, num_examples

  def _start(self, k, i):
    """Returns the Step and what is known of it before forward."""
    theta, inputs, rng, num_examples = self._call(k, i)
    step = self._stages[k].functions.step(theta, inputs, rng, num_examples)
    return step, step.start(theta, [*inputs, *rng])

  def _way_back(self, k, i):
    """Returns the Step, what is known of it, and the gradients that came in."""
    step = self._stages[k].functions.step(*self._call(k, i))
    known = self._known.pop((k, i))
    awaits = self._stages[k].plan.wiring.awaits
    return step, known, [self._cotangents[i].pop(v) for v in awaits]

  def _send_back(self, k, i, dinputs):
    values = self._plan.wiring.values
    takes = self._stages[k].plan.wiring.takes
    differentiable = [v for v in takes if values[v].has_gradient]
    self._cotangents[i].update(zip(differentiable, dinputs, strict=True))

  def _sums_for(self, k, i):
    """Returns the sums that micro-batch i is added to, if it is its turn."""
    if self.gradients[k] is None or i != self._next_to_sum[k]:
      return self._stages[k].functions.zeros()
    return self.gradients[k]

  def _sum(self, k, i, sums):
    """Notes new sums, and adds those that came too early."""
    early = self._early[k]
    early[i] = sums
    while self._next_to_sum[k] in early:
      next_sums = early.pop(self._next_to_sum[k])
      if self._next_to_sum[k] != i:
        accumulate = self._stages[k].functions.accumulate
        next_sums = accumulate(self.gradients[k], next_sums)
        self._ran(k, next_sums)
      self.gradients[k] = next_sums
      self._next_to_sum[k] += 1

  def _ran(self, k, outputs):
    """Notes the op that the next action on the device waits for."""
    if outputs and not tf.executing_eagerly():
      self._last_ops[self._stages[k].plan.device] = outputs[0].op


def run_differentiably(
  plan: plan_lib.Plan,
  stages: Sequence[Stage],
  thetas: Sequence[Sequence[tf.Tensor]],
  micro_batches: Sequence[dict[int, tf.Tensor]],
  step: tf.Tensor,
  first_example: int = 0,
) -> list[dict[int, tf.Tensor]]:
  """Runs all forwards so that TensorFlow can differentiate through them.

  Arguments as for `run`; returns the values of each micro-batch.
  """
  runner = _Runner(plan, stages, thetas, micro_batches, step, first_example)
  for action in schedule_lib.global_order(plan.forwards, plan.num_stages):
    runner.run_differentiably(action)
  return runner.values
