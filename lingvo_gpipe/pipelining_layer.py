"""The builder: a list of layers becomes a pipeline of stages on devices."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe import (
  devices,
  errors,
  micro_batches,
  partition,
  pipelining_params,
  tied_weights,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe import stage as stage_lib
from lingvo_gpipe.engine import mpmd
from lingvo_gpipe.engine import stopwatch as stopwatch_lib
from lingvo_gpipe.stage import calls


class PipeliningLayer(base_layer.BaseLayer):
  """Runs a list of layers as a pipeline (arXiv 1811.06965).

      layer_tpl  emb b0 b1 b2 b3 norm     micro-batches  0 1 2 3
                 '-----' '---' '----'
      stages        0      1      2  + loss_tpl

  Takes the place of `lingvo.core.gpipe.PipeliningLayer`: the fields `cell_tpl`,
  `before_tpl`, `num_micro_batches`, `micro_batch_size` and `batch_dim` mean
  what they mean there. Gives the numbers of the same layers on one device.
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    pipelining_params.define(p)
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    pipelining_params.check(p)
    if left_open := pipelining_params.open_fields(p):
      raise errors.UserError(
        f'{p.name}: {", ".join(left_open)} = auto is for the trainer and '
        'python -m lingvo_gpipe.plan to settle; here, give a value.'
      )
    self._layer_params, cuts = pipelining_params.list_layers(p)
    schedule = pipelining_params.make_schedule(p, p.num_micro_batches)
    device_of = schedule_lib.placement(schedule)
    self._devices = tuple(p.devices or devices.stage_devices(len(schedule)))
    if len(self._devices) != len(schedule):
      raise errors.UserError(
        f'{p.name}.devices names {len(self._devices)} devices, the schedule '
        f'has {len(schedule)}.'
      )
    # Plans and stages made so far, by what they were made for.
    self._plans, self._stages = {}, {}
    self._machine = pipelining_params.machine(p)
    self._machine.check(len(schedule))
    self._cuts = cuts or self._cut_layers(schedule)
    names = [layer.name for layer in self._layer_params]
    tied = tied_weights.TiedWeights(p.tied_weights, names)
    for device, layers in zip(device_of, self._cuts, strict=True):
      for l in layers:
        with tf.device(self._devices[device]), tied.building(names[l]):
          self.CreateChild(names[l], self._layer_params[l])
    tied.check_all_used()

  def _cut_layers(self, schedule) -> Sequence[range]:
    p = self.params
    num_stages = schedule_lib.num_stages(schedule)
    if p.input_specs is None:
      return partition.cut([1] * len(self._layer_params), num_stages)
    network = self._trace(
      self._layer_params, tuple(p.input_specs), tuple(p.target_specs)
    )
    costs = plan_lib.Costs(network, self._machine)
    return plan_lib.cut(costs, schedule, p.remat)

  def _trace(self, layers, inputs, targets) -> plan_lib.Network:
    """Traces layers on the largest micro-batch of a mini-batch like this."""
    p = self.params
    return plan_lib.trace_network(
      layers,
      *self._largest_micro_batch(inputs, targets),
      p.batch_dim,
      p.optimizer,
      p.tied_weights,
    )

  def FProp(self, theta, *args):
    """Runs the layers, without the loss, and returns what the last returns.

    Differentiable; recomputes activations as `remat` says.

    Args:
      theta: weights of the layers by name.
      *args: tensors or structures of tensors with a batch dimension.
    """
    # The loss layer stays out; its stage ends with the last layer of the list.
    plan, stages, values = self._prepare(args, (), with_loss=False)
    theta = self._theta_by_stage(theta, plan)
    values = mpmd.run_differentiably(plan, stages, theta, values, _step())
    joined = tf.nest.map_structure(
      lambda *parts: micro_batches.join(parts, self.params.batch_dim),
      *[_take(plan.wiring.outputs, v) for v in values],
    )
    return joined[0] if len(joined) == 1 else joined

  def FPropLoss(self, theta, inputs: tuple, targets: tuple = ()):
    """Runs forward alone and returns the metrics of the mini-batch.

    Args:
      theta: weights of the layers by name.
      inputs: arguments of the first layer.
      targets: arguments of the loss layer after the outputs.

    Returns:
      A NestedMap of metrics, each (average over the mini-batch, weight).
    """
    plan, stages, values = self._prepare(inputs, targets)
    theta = self._theta_by_stage(theta, plan)
    results = mpmd.run(plan.forwards, plan, stages, theta, values, _step())
    return self._combine_metrics(plan, results)

  def ForwardBackward(
    self,
    theta,
    inputs: tuple,
    targets: tuple = (),
    stopwatch: stopwatch_lib.Stopwatch | None = None,
  ):
    """Runs one mini-batch forward and backward through the pipeline.

    Args:
      theta: weights of the layers by name.
      inputs: arguments of the first layer.
      targets: arguments of the loss layer after the outputs.
      stopwatch: to note when each action runs.

    Returns:
      (metrics, gradients): metrics as from FPropLoss, and for each layer by
      name a NestedMap like its theta with the gradients of the loss, averaged
      over the weight of the whole mini-batch; None where a weight does not
      train, or is that of an earlier layer, which has the sum then.
    """
    plan, stages, values = self._prepare(inputs, targets)
    theta = self._theta_by_stage(theta, plan)
    results = mpmd.run(
      plan.schedule, plan, stages, theta, values, _step(), stopwatch
    )
    metrics = self._combine_metrics(plan, results)
    total_weight = metrics[self.params.loss_name][1]
    factor = tf.math.reciprocal_no_nan(total_weight)
    gradients = []
    for stage, sums in zip(stages, results.gradients, strict=True):
      with tf.device(stage.plan.device):
        averages = stage.functions.scale(sums, factor)
      gradients += stage.functions.pack_gradients(averages)
    if self.params.tied_weights:
      layers = [self.children[name] for name in plan.names]
      gradients = tied_weights.sum_gradients(layers, gradients)
    return metrics, py_utils.NestedMap(zip(plan.names, gradients, strict=True))

  def Plan(self, inputs: tuple, targets: tuple = (), with_loss: bool = True):
    """Returns the Plan for arguments like these (specs or tensors)."""
    p = self.params
    inputs, targets = tf.nest.map_structure(_spec, (inputs, targets))
    key = str((inputs, targets)), with_loss, self.do_eval
    if key not in self._plans:
      layers, stages = self._layer_params, self._cuts
      if p.loss_tpl and not with_loss:
        layers = layers[:-1]
        stages = [range(s.start, min(s.stop, len(layers))) for s in stages]
      cuts = [stage for stage in stages if stage]
      sizes = micro_batches.sizes(
        p, micro_batches.batch_size(inputs, p.batch_dim)
      )
      schedule = pipelining_params.make_schedule(p, len(sizes))
      if not with_loss:
        device_of = schedule_lib.placement(schedule)[: len(cuts)]
        schedule = schedule_lib.forward_only(device_of, len(sizes))
      network = self._trace(layers, inputs, targets)
      # Nothing is kept where nothing goes back.
      remat = p.remat if with_loss or p.remat != 'budget' else 'full'
      costs = plan_lib.Costs(network, self._machine)
      self._plans[key] = plan_lib.make_plan(
        network,
        sizes,
        schedule,
        self._devices,
        remat,
        cuts,
        plan_lib.remats(costs, schedule, remat, cuts),
      )
    return self._plans[key]

  def _largest_micro_batch(self, inputs, targets):
    """Returns specs of a mini-batch cut down to its largest micro-batch."""
    p = self.params
    batch_size = micro_batches.batch_size(inputs, p.batch_dim)
    largest = micro_batches.sizes(p, batch_size)[0]
    return tf.nest.map_structure(
      lambda spec: micro_batches.with_batch_size(spec, p.batch_dim, largest),
      (inputs, targets),
    )

  def _prepare(self, inputs, targets, with_loss=True):
    """Returns plan, stages, and the values of each micro-batch."""
    p = self.params
    if with_loss and not p.loss_tpl:
      raise errors.UserError(f'{p.name}.loss_tpl is not set.')
    plan = self.Plan(inputs, targets, with_loss)
    key = id(plan)
    if key not in self._stages:
      self._stages[key] = stage_lib.build_stages(
        plan,
        [self.children[name] for name in plan.names],
        p.random_seed,
        p.batch_dim,
        p.loss_name if with_loss else None,
      )
    leaves = tf.nest.flatten((inputs, targets))
    users = {
      v: stage.device
      for stage in reversed(plan.stages)
      for v in stage.wiring.takes
    }
    values = [{} for _ in plan.micro_batch_sizes]
    for v, leaf in zip(plan.wiring.inputs, leaves, strict=True):
      if v is not None:
        with tf.device(users.get(v, plan.stages[-1].device)):
          parts = micro_batches.split(leaf, plan.micro_batch_sizes, p.batch_dim)
        for of_micro_batch, part in zip(values, parts, strict=True):
          of_micro_batch[v] = part
    return plan, self._stages[key], values

  def _theta_by_stage(self, theta, plan):
    """Reads the weights of each stage, on its device, as a flat list."""
    by_stage = []
    for stage in plan.stages:
      with tf.device(stage.device):
        by_stage.append(
          [
            leaf.read_value() if isinstance(leaf, tf.Variable) else leaf
            for l in stage.layers
            for leaf in theta[plan.names[l]].Flatten()
          ]
        )
    return by_stage

  def _combine_metrics(self, plan, results):
    with tf.device(plan.stages[-1].device):
      return _weighted_average(
        [_take(plan.wiring.outputs, values)[0] for values in results.values]
      )


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


def _spec(leaf: Any) -> tf.TensorSpec | None:
  if leaf is None or isinstance(leaf, tf.TensorSpec):
    return leaf
  leaf = tf.convert_to_tensor(leaf)
  return tf.TensorSpec(leaf.shape, leaf.dtype)


def _take(structure, values):
  """Replaces value ids in `structure` by the tensors of one micro-batch."""
  return tf.nest.map_structure(
    lambda v: None if v is None else values[v], structure
  )


def _step() -> tf.Tensor:
  # The value, not the variable: a stage that read the variable could see the
  # step after this one.
  step = tf.convert_to_tensor(py_utils.GetGlobalStep())
  return tf.cast(step, tf.int64)
