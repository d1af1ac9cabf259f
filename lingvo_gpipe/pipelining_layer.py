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
  replicas,
  tied_weights,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe import stage as stage_lib
from lingvo_gpipe.engine import stopwatch as stopwatch_lib


class PipeliningLayer(base_layer.BaseLayer):
  """Runs a list of layers as a pipeline (arXiv 1811.06965).

      layer_tpl  emb b0 b1 b2 b3 norm     micro-batches  0 1 2 3
                 '-----' '---' '----'
      stages        0      1      2  + loss_tpl

  Takes the place of `lingvo.core.gpipe.PipeliningLayer`: the fields `cell_tpl`,
  `before_tpl`, `num_micro_batches`, `micro_batch_size` and `batch_dim` mean
  what they mean there. Gives the numbers of the same layers on one device.
  With `num_replicas`, several copies share a mini-batch (replicas.py).
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
    # Of each replica, the devices of the schedule.
    self._devices = self._find_devices(len(schedule))
    # Plans and replicas made so far, by what they were made for.
    self._plans, self._replicas = {}, {}
    self._machine = pipelining_params.machine(p)
    self._machine.check(len(schedule))
    self._cuts = cuts or self._cut_layers(schedule)
    names = [layer.name for layer in self._layer_params]
    tied = tied_weights.TiedWeights(p.tied_weights, names)
    homes = replicas.Homes(self._devices, p.shard_optimizer)
    self._homes = {}
    for device, layers in zip(device_of, self._cuts, strict=True):
      for l in layers:
        home = self._homes[names[l]] = homes.choose(device)
        with tf.device(home), tied.building(names[l]):
          self.CreateChild(names[l], self._layer_params[l])
        homes.add(home, self.children[names[l]].vars.Flatten())
    tied.check_all_used()

  def _find_devices(self, per_replica: int) -> list[tuple[str, ...]]:
    p = self.params
    R = p.num_replicas
    names = tuple(p.devices or devices.stage_devices(per_replica, R))
    if len(names) != R * per_replica:
      each = f' in each of {R} replicas' if R > 1 else ''
      raise errors.UserError(
        f'{p.name}.devices names {len(names)} devices, the schedule has '
        f'{per_replica}{each}.'
      )
    return [names[r * per_replica :][:per_replica] for r in range(R)]

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
    made, shares = self._prepare(args, (), with_loss=False)
    step = _step()
    outputs = []
    for replica, leaves in zip(made, shares, strict=True):
      values = replica.run_differentiably(theta, leaves, step)
      outputs += replica.outputs(values)
    joined = tf.nest.map_structure(
      lambda *parts: micro_batches.join(parts, self.params.batch_dim), *outputs
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
    made, results = self._run(
      lambda plan: plan.forwards, theta, inputs, targets
    )
    return replicas.combine_metrics(made, results)

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
      stopwatch: to note when each action of the first replica runs.

    Returns:
      (metrics, gradients): metrics as from FPropLoss, and for each layer by
      name a NestedMap like its theta with the gradients of the loss, averaged
      over the weight of the whole mini-batch; None where a weight does not
      train, or is that of an earlier layer, which has the sum then.
    """
    made, results = self._run(
      lambda plan: plan.schedule, theta, inputs, targets, stopwatch
    )
    metrics = replicas.combine_metrics(made, results)
    total_weight = metrics[self.params.loss_name][1]
    gradients = replicas.average_gradients(
      made, results, self._homes, tf.math.reciprocal_no_nan(total_weight)
    )
    names = made[0].plan.names
    if self.params.tied_weights:
      layers = [self.children[name] for name in names]
      gradients = tied_weights.sum_gradients(layers, gradients)
    return metrics, py_utils.NestedMap(zip(names, gradients, strict=True))

  def _run(self, schedule_of, theta, inputs, targets, stopwatch=None):
    """Returns the replicas and the results of each."""
    made, shares = self._prepare(inputs, targets)
    step = _step()
    results = []
    for replica, leaves in zip(made, shares, strict=True):
      schedule = schedule_of(replica.plan)
      results.append(replica.run(schedule, theta, leaves, step, stopwatch))
      stopwatch = None  # It is for the first.
    return made, results

  def Plan(self, inputs: tuple, targets: tuple = (), with_loss: bool = True):
    """Returns the Plan for arguments like these (specs or tensors).

    With replicas, that of the first, which has the largest share.
    """
    return self._plan_all(inputs, targets, with_loss)[0]

  def _plan_all(self, inputs, targets, with_loss):
    """Returns the plan of each replica."""
    p = self.params
    inputs, targets = tf.nest.map_structure(_spec, (inputs, targets))
    key = str((inputs, targets)), with_loss, self.do_eval
    if key not in self._plans:
      batch_size = micro_batches.batch_size(inputs, p.batch_dim)
      make = self._plan_maker(inputs, targets, with_loss)
      by_count, plans = {}, []
      for share, names in zip(
        micro_batches.shares(p, batch_size), self._devices, strict=True
      ):
        sizes = micro_batches.sizes(p, share)
        if len(sizes) not in by_count:
          by_count[len(sizes)] = make(sizes)
        plans.append(by_count[len(sizes)].for_replica(names, sizes))
      self._plans[key] = plans
    return self._plans[key]

  def _plan_maker(self, inputs, targets, with_loss):
    """Returns a function from sizes of micro-batches to the Plan."""
    p = self.params
    layers, stages = self._layer_params, self._cuts
    if p.loss_tpl and not with_loss:
      layers = layers[:-1]
      stages = [range(s.start, min(s.stop, len(layers))) for s in stages]
    cuts = [stage for stage in stages if stage]
    network = self._trace(layers, inputs, targets)
    # Nothing is kept where nothing goes back.
    remat = p.remat if with_loss or p.remat != 'budget' else 'full'
    costs = plan_lib.Costs(network, self._machine)

    def make(sizes):
      schedule = pipelining_params.make_schedule(p, len(sizes))
      if not with_loss:
        device_of = schedule_lib.placement(schedule)[: len(cuts)]
        schedule = schedule_lib.forward_only(device_of, len(sizes))
      return plan_lib.make_plan(
        network,
        sizes,
        schedule,
        self._devices[0],
        remat,
        cuts,
        plan_lib.remats(costs, schedule, remat, cuts),
      )

    return make

  def _largest_micro_batch(self, inputs, targets):
    """Returns specs of a mini-batch cut down to its largest micro-batch."""
    p = self.params
    batch_size = micro_batches.batch_size(inputs, p.batch_dim)
    share, *_ = micro_batches.shares(p, batch_size)
    largest, *_ = micro_batches.sizes(p, share)
    return tf.nest.map_structure(
      lambda spec: micro_batches.with_batch_size(spec, p.batch_dim, largest),
      (inputs, targets),
    )

  def _prepare(self, inputs, targets, with_loss=True):
    """Returns the replicas, and for each its share of the arguments, flat."""
    p = self.params
    if with_loss and not p.loss_tpl:
      raise errors.UserError(f'{p.name}.loss_tpl is not set.')
    plans = self._plan_all(inputs, targets, with_loss)
    key = id(plans)
    if key not in self._replicas:
      stages = stage_lib.build_stages(
        plans[0],
        [self.children[name] for name in plans[0].names],
        p.random_seed,
        p.batch_dim,
        p.loss_name if with_loss else None,
        p.random_bits,
      )
      self._replicas[key] = replicas.make_replicas(plans, stages, p.batch_dim)
    made = self._replicas[key]
    return made, replicas.split(made, tf.nest.flatten((inputs, targets)))


def _spec(leaf: Any) -> tf.TensorSpec | None:
  if leaf is None or isinstance(leaf, tf.TensorSpec):
    return leaf
  leaf = tf.convert_to_tensor(leaf)
  return tf.TensorSpec(leaf.shape, leaf.dtype)


def _step() -> tf.Tensor:
  # The value, not the variable: a stage that read the variable could see the
  # step after this one.
  step = tf.convert_to_tensor(py_utils.GetGlobalStep())
  return tf.cast(step, tf.int64)
