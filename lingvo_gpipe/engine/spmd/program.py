"""From a task's Params to the training step of all cores.

Decides what the cores do: which layers are the stages, what is kept of their
inputs, which core holds what. Nothing is allocated.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from lingvo.core import base_layer, learner

from lingvo_gpipe import (
  errors,
  micro_batches,
  pipeline_task,
  pipelining_params,
  randomness,
  tied_weights,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.engine.spmd import (
  chain,
  equal_layers,
  layout,
  pipeline,
  step,
)
from lingvo_gpipe.engine.spmd import mesh as mesh_lib

# Where the names of all stages' weights begin.
STAGES = 'stages'

_SCHEDULES = ('gpipe', '1f1b', 'interleaved')


@dataclasses.dataclass(frozen=True)
class Program:
  """What all cores run.

  Attributes:
    step: the training step, a function of arrays.
    shape: of the pipeline.
    stage_layers: names of the layers of each stage.
    inputs: entries of the arguments that the first layer takes of a batch.
    targets: entries of those that the loss takes.
  """

  step: step.TrainStep
  shape: pipeline.Shape
  stage_layers: tuple[tuple[str, ...], ...]
  inputs: tuple[layout.Entry, ...]
  targets: tuple[layout.Entry, ...]

  @property
  def mesh(self) -> mesh_lib.Mesh:
    return self.shape.mesh

  @property
  def arguments(self) -> list[layout.Entry]:
    """The entries of all arguments of `run`."""
    return [*self.step.state, *self.inputs, *self.targets]

  def run(self, *arrays: tf.Tensor) -> list[tf.Tensor]:
    """Runs a step on flat arguments; returns the state, then the metrics.

    The metrics are in the order of `step.scalars`.
    """
    num_state = len(self.step.state)
    state, batch = arrays[:num_state], arrays[num_state:]
    inputs, targets = batch[: len(self.inputs)], batch[len(self.inputs) :]
    state, metrics = self.step(state, inputs, targets)
    return [*state, *[metrics[name] for name in self.step.scalars]]


def build(task, batch_spec) -> Program:
  """Returns the program of a task.

  Args:
    task: Params of a PipelineTask.
    batch_spec: NestedMap of specs of a mini-batch.

  Raises:
    UserError: the spmd engine cannot run it; says what can.
  """
  p = base_layer.BaseLayer.CopyBaseParams(task, task.pipeline.Copy())
  _check(p)
  mesh = mesh_lib.Mesh(num_stages(p) // virtual_stages(p), p.num_replicas)
  inputs, targets = pipeline_task.split_batch(task, batch_spec)
  size = _micro_batch_size(p, micro_batches.batch_size(inputs, 0))
  layers, _ = pipelining_params.list_layers(p)
  network = _trace(p, layers, inputs, targets, size, task)
  run = equal_layers.find_run(network)
  _check_run(p, network, run, mesh)
  shape = pipeline.Shape(
    mesh=mesh,
    num_circuits=virtual_stages(p),
    layers_per_stage=len(run) // num_stages(p),
    layers_per_segment=_layers_per_segment(p, len(run) // num_stages(p)),
    num_micro_batches=_num_micro_batches(p, size, inputs),
    micro_batch_size=size,
  )
  seed = p.random_seed
  maker = _Maker(p, layers, network, shape, seed)
  carried = equal_layers.args_of(network, run.start)
  stage = maker.chain(run[:1], carried)
  stage_of = stage_grid(shape, run)
  names = network.names
  before = range(run.start)
  after = range(run.stop, len(layers))
  outside, places = maker.outside(before, after)
  target_entries = _entries(task.target_keys, targets)
  return Program(
    step=step.TrainStep(
      shape,
      step.Outside(
        maker.chain(before, inputs), places[: _count(network, before)], maker.seeds(before)
      ),
      step.Outside(
        maker.chain(after, carried), places[_count(network, before) :], maker.seeds(after)
      ),
      equal_layer(stage),
      chain.present(carried),
      [
        layout.stacked(
          f'{STAGES}/{name}', spec, mesh.num_stages, shape.layers_per_core
        )
        for name, spec in zip(stage.weights[0], stage.weight_specs, strict=True)
      ],
      outside,
      np.vectorize(lambda l: randomness.layer_seed(seed, names[l]))(stage_of),
      learner_of(task),
      p.loss_name,
      target_entries,
    ),
    shape=shape,
    stage_layers=tuple(
      tuple(names[l] for l in row) for row in stage_of
    ),
    inputs=_entries(task.input_keys, inputs),
    targets=target_entries,
  )


def stage_grid(shape: pipeline.Shape, run: range) -> np.ndarray:
  """Returns the layers [stages, layers a core] of each core of the ring.

  With V circuits, core k has stages k, K + k, 2 K + k and so on.
  """
  V, n = shape.num_circuits, shape.layers_per_stage
  grid = np.array(run).reshape(V, shape.mesh.num_stages, n)
  return grid.transpose(1, 0, 2).reshape(shape.mesh.num_stages, V * n)


def equal_layer(layer: chain.Chain) -> pipeline.StageLayer:
  """Returns the layer of stages that are made of equal ones."""

  def forward(core, theta, values, rng):
    del core
    return layer.forward(theta, values, rng)

  def vjp(core, theta, values, rng, cotangents):
    del core
    dtheta, dvalues = chain.vjp(
      lambda theta, values: layer.forward(theta, values, rng),
      theta,
      values,
      cotangents,
    )
    return dvalues, dtheta

  return pipeline.StageLayer(forward, vjp)


def virtual_stages(p) -> int:
  """Returns V, the stages of a core."""
  return (p.virtual_stages or 2) if p.schedule == 'interleaved' else 1


def num_stages(p) -> int:
  return pipelining_params.num_stages(p)


def learner_of(task):
  """Returns Params of the task's Learner, as Lingvo makes them."""
  p = task.train
  made = p.learner
  if made is None:
    made = learner.ExtractLearnerFromLegacyParams(p.Copy())
  step.check_learner(made)
  return made


class _Maker:
  """Makes the parts of a program."""

  def __init__(self, p, layers, network, shape, seed):
    self._p = p
    self._layers = layers
    self._network = network
    self._shape = shape
    self._seed = seed

  def chain(self, layers: Sequence[int], args: tuple) -> chain.Chain:
    return chain.Chain(
      [self._layers[l] for l in layers],
      [self._network.traces[l] for l in layers],
      args,
      self._p.random_bits,
    )

  def seeds(self, layers) -> list[int]:
    return [
      randomness.layer_seed(self._seed, self._network.names[l]) for l in layers
    ]

  def outside(self, *groups) -> tuple[list[layout.Entry], list[int]]:
    """Returns entries of the weights of layers, and for each weight its own.

    Tied weights have the entry of the first of them.
    """
    tied = tied_weights.TiedWeights(self._p.tied_weights, self._network.names)
    del tied  # Made for its checks.
    entries, places, index = [], [], {}
    for l in [l for group in groups for l in group]:
      name = self._network.names[l]
      for weight in self._network.traces[l].weights:
        path = f'{name}/{weight.name}'
        index[path] = len(entries)
        spec = tf.TensorSpec(weight.shape, weight.dtype)
        entries.append(
          layout.spread(path, spec, self._shape.mesh.num_stages)
        )
        places.append(index[path])
    return entries, places


def _count(network, layers):
  return sum(len(network.traces[l].weights) for l in layers)


def _trace(p, layers, inputs, targets, size, task):
  specs = tf.nest.map_structure(
    lambda s: micro_batches.with_batch_size(s, 0, size), (inputs, targets)
  )
  return plan_lib.trace_network(
    layers, *specs, 0, pipeline_task.optimizer_of(task), p.tied_weights
  )


def _entries(keys, specs):
  return tuple(
    layout.whole(key, tf.TensorSpec(spec.shape, spec.dtype))
    for key, spec in zip(keys, specs, strict=True)
  )


def _check(p):
  """Raises a UserError for fields that only the mpmd engine knows."""
  if p.schedule_file or p.schedule not in _SCHEDULES:
    asked = p.schedule_file or p.schedule
    raise errors.UserError(
      f'The spmd engine fills and drains, with virtual stages or without; it '
      f'cannot run the schedule {asked}: set schedule to one of '
      f'{", ".join(_SCHEDULES)}, or use engine=mpmd.'
    )
  if p.batch_dim != 0:
    raise errors.UserError(
      f'{p.name}.batch_dim={p.batch_dim}: the spmd engine needs the batch in '
      'dimension 0. Use batch-major layers, or engine=mpmd.'
    )
  V = virtual_stages(p)
  if num_stages(p) % V:
    raise errors.UserError(
      f'num_stages={num_stages(p)} is no multiple of virtual_stages={V}: set '
      f'num_stages to {num_stages(p) // V * V or V}.'
    )


def _micro_batch_size(p, batch_size):
  shares = micro_batches.shares(p, batch_size)
  sizes = {size for share in shares for size in micro_batches.sizes(p, share)}
  if len(sizes) > 1:
    raise errors.UserError(
      f'The spmd engine needs micro-batches of one size; {batch_size} examples '
      f'make {sorted(sizes)}. Set the batch size to a multiple of '
      'num_micro_batches x num_replicas, or use engine=mpmd.'
    )
  return sizes.pop() * p.num_replicas


def _num_micro_batches(p, size, inputs):
  count = micro_batches.batch_size(inputs, 0) // size
  cores = num_stages(p) // virtual_stages(p)
  if virtual_stages(p) > 1 and count < cores:
    raise errors.UserError(
      f'num_micro_batches={count}: with virtual stages the spmd engine needs '
      f'one for each core at least; set num_micro_batches to {cores} or more.'
    )
  return count


def _check_run(p, network, run, mesh):
  if len(run) % num_stages(p) or not run:
    wanted = num_stages(p)
    raise errors.UserError(
      f'{len(run)} equal layers ({network.names[run.start]} and on) do not '
      f'divide into {wanted} stages.'
    )


def _layers_per_segment(p, layers_per_stage):
  """Returns after how many layers an input is kept."""
  if p.remat in ('none', 'except_last'):
    return 1
  if p.remat == 'full':
    return layers_per_stage
  kind, _, number = p.remat.partition(':')
  if kind == 'revolve':
    # As many inputs as asked for, or the next number below that divides.
    for count in range(min(int(number), layers_per_stage), 0, -1):
      if layers_per_stage % count == 0:
        return layers_per_stage // count
  raise errors.UserError(
    f'remat={p.remat}: the spmd engine knows none (keeps the input of every '
    'layer), full (of every stage) and revolve:S (S inputs a stage).'
  )
