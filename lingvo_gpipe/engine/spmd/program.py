"""From a task's Params to the training step of all cores.

Decides what the cores do: which layers are the stages, what is kept of their
inputs, which core holds what. Nothing is allocated.
"""

import dataclasses

import numpy as np
import tensorflow as tf
from lingvo.core import base_layer

from lingvo_gpipe import (
  micro_batches,
  partition,
  pipeline_task,
  pipelining_params,
  randomness,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.cost import memory
from lingvo_gpipe.engine.spmd import (
  apply,
  chain,
  core,
  equal_layers,
  fields,
  gradients,
  layout,
  step,
  unequal_layers,
)
from lingvo_gpipe.engine.spmd import mesh as mesh_lib

# Where the names of all stages' weights begin.
STAGES = 'stages'


@dataclasses.dataclass(frozen=True)
class Program:
  """What all cores run.

  Attributes:
    step: the training step, a function of arrays.
    shape: of the pipeline.
    rows: for each array of the stages' weights: for each core, for each of its
      rows, the weights in it as (layer/weight, shape).
    padding: bytes of weights, on all cores, that make rows equally long.
    inputs: entries of the arguments that the first layer takes of a batch.
    targets: entries of those that the loss takes.
  """

  step: step.TrainStep
  shape: core.Shape
  rows: dict[str, tuple]
  padding: int
  inputs: tuple[layout.Entry, ...]
  targets: tuple[layout.Entry, ...]

  @property
  def mesh(self) -> mesh_lib.Mesh:
    return self.shape.mesh

  @property
  def arguments(self) -> list[layout.Entry]:
    """The entries of all arguments of `run`."""
    return [*self.step.state, *self.inputs, *self.targets]

  def describe(self) -> str:
    """Says in a line or two what the cores do."""
    mesh, shape = self.mesh, self.shape
    text = (
      f'spmd: {mesh.num_stages} cores x {mesh.num_replicas} replicas, '
      f'{shape.num_micro_batches} micro-batches of {shape.micro_batch_size}, '
      f'{shape.num_circuits} stages a core of {shape.layers_per_stage} layers, '
      f'the input of every {shape.layers_per_segment} kept'
    )
    if self.padding:
      text += f'\nstages differ: {self.padding:,} bytes of weights are padding'
    return text

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
  fields.check(p)
  inputs, targets = pipeline_task.split_batch(task, batch_spec)
  layers, _ = pipelining_params.list_layers(p)
  size = fields.micro_batch_size(p, inputs)
  network = _trace(task, p, layers, inputs, targets, size)
  run = equal_layers.find_run(network)
  maker = _Maker(p, layers, network, inputs, size)
  can_stack = run and len(run) % fields.num_stages(p) == 0
  parts = maker.equal(run) if can_stack else maker.unequal()
  target_entries = _entries(task.target_keys, targets)
  return Program(
    step=step.TrainStep(
      parts.shape.mesh,
      [*parts.stage_weights, *parts.outside_weights],
      gradients.Gradients(
        parts.shape,
        parts.before,
        parts.after,
        parts.stage_layer,
        parts.carried,
        len(parts.stage_weights),
        parts.outside_weights,
        parts.stage_seeds,
        p.loss_name,
        target_entries,
      ),
      apply.Apply(
        fields.learner_of(task),
        parts.shape.mesh,
        parts.shape.layers_per_core,
        parts.stage_weights,
        parts.outside_weights,
      ),
      p.loss_name,
    ),
    shape=parts.shape,
    rows=parts.rows,
    padding=parts.padding,
    inputs=_entries(task.input_keys, inputs),
    targets=target_entries,
  )


@dataclasses.dataclass(frozen=True)
class _Parts:
  """What a step is made of; see step.TrainStep and Program."""

  shape: core.Shape
  before: gradients.Outside
  after: gradients.Outside
  stage_layer: core.StageLayer
  carried: list[tf.TensorSpec]
  stage_weights: list[layout.Entry]
  outside_weights: list[layout.Entry]
  stage_seeds: np.ndarray
  rows: dict[str, tuple]
  padding: int = 0


class _Maker:
  """Makes the parts of a step."""

  def __init__(self, p, layers, network, inputs, size):
    self._p = p
    self._layers = layers
    self._network = network
    self._inputs = inputs
    self._size = size
    self._mesh = fields.mesh(p)

  def equal(self, run: range) -> _Parts:
    """Stages of equal layers, with all other layers outside."""
    p, network = self._p, self._network
    per_stage = len(run) // fields.num_stages(p)
    carried = equal_layers.args_of(network, run.start)
    segment = fields.layers_per_segment(
      p,
      per_stage,
      self._static_bytes(run.start),
      self._bytes_per_input(carried),
    )
    shape = self._shape(fields.virtual_stages(p), per_stage, segment)
    grid = stage_grid(shape, run)
    stage = self._chain(run[:1], carried)
    before, after = range(run.start), range(run.stop, len(self._layers))
    entries, places = self._outside_weights([*before, *after])
    middle = self._count(before)
    names = network.names
    return _Parts(
      shape=shape,
      before=gradients.Outside(
        self._chain(before, self._inputs), places[:middle], self._seeds(before)
      ),
      after=gradients.Outside(
        self._chain(after, carried), places[middle:], self._seeds(after)
      ),
      stage_layer=equal_layers.stage_layer(stage),
      carried=chain.present(carried),
      stage_weights=[
        layout.stacked(
          f'{STAGES}/{name}', spec, shape.mesh.num_stages, shape.layers_per_core
        )
        for name, spec in zip(stage.weights[0], stage.weight_specs, strict=True)
      ],
      outside_weights=entries,
      stage_seeds=np.array([self._seeds(row) for row in grid]),
      rows={
        f'{STAGES}/{weight}': tuple(
          tuple(((f'{names[l]}/{weight}', tuple(spec.shape)),) for l in row)
          for row in grid
        )
        for weight, spec in zip(
          stage.weights[0], stage.weight_specs, strict=True
        )
      },
    )

  def unequal(self) -> _Parts:
    """Stages that differ; only the loss is outside."""
    p, network = self._p, self._network
    K, last = self._mesh.num_stages, len(self._layers) - 1
    fields.check_unequal(p, last)
    costs = [trace.fprop_flops for trace in network.traces[:last]]
    cuts = partition.cut(costs, K)
    args = [equal_layers.args_of(network, cut.start) for cut in cuts]
    num_targets = len(equal_layers.args_of(network, last)) - len(
      network.traces[last - 1].outputs
    )
    args.append(equal_layers.args_of(network, last)[: -num_targets or None])
    stages = unequal_layers.Stages(
      [
        self._chain(cut, of_stage)
        for cut, of_stage in zip(cuts, args, strict=False)
      ],
      [self._seeds(cut) for cut in cuts],
      packings := unequal_layers.make_packings(
        [chain.present(of_stage) for of_stage in args]
      ),
    )
    loss = [last]
    entries, places = self._outside_weights(loss)
    return _Parts(
      shape=self._shape(1, 1, 1),
      before=gradients.Outside(
        unequal_layers.PackedInputs(packings[0]), [], []
      ),
      after=gradients.Outside(
        unequal_layers.UnpackedResults(
          self._chain(loss, args[-1]), packings[-1]
        ),
        places,
        self._seeds(loss),
      ),
      stage_layer=stages.layer(),
      carried=[stages.carried(self._size)],
      stage_weights=[layout.stacked(f'{STAGES}/row', stages.weight_spec, K, 1)],
      outside_weights=entries,
      stage_seeds=np.zeros([K, 1], np.int64),
      rows={
        f'{STAGES}/row': tuple(
          (
            tuple(
              (f'{network.names[l]}/{w.name}', tuple(w.shape))
              for l in cut
              for w in network.traces[l].weights
            ),
          )
          for cut in cuts
        )
      },
      padding=stages.padding * stages.weight_spec.dtype.size,
    )

  def _shape(self, num_circuits, layers_per_stage, layers_per_segment):
    return core.Shape(
      mesh=self._mesh,
      num_circuits=num_circuits,
      layers_per_stage=layers_per_stage,
      layers_per_segment=layers_per_segment,
      num_micro_batches=fields.num_micro_batches(
        self._p, self._size, self._inputs
      ),
      micro_batch_size=self._size,
    )

  def _static_bytes(self, layer):
    """Returns what a core holds beside kept inputs: state, and one layer."""
    traces = self._network.traces
    state = sum(trace.param_bytes + trace.trained_bytes for trace in traces)
    state += sum(self._network.slot_bytes)
    backward = traces[layer].backward
    return (
      state // self._mesh.num_stages
      + (backward.internal_bytes + backward.workspace)
      // self._mesh.num_replicas
    )

  def _bytes_per_input(self, carried):
    sizes = [memory.size(spec) for spec in chain.present(carried)]
    count = fields.num_micro_batches(self._p, self._size, self._inputs)
    items = fields.virtual_stages(self._p) * count
    return items * sum(sizes) // self._mesh.num_replicas

  def _chain(self, layers, args):
    return chain.Chain(
      [self._layers[l] for l in layers],
      [self._network.traces[l] for l in layers],
      args,
      self._p.random_bits,
    )

  def _seeds(self, layers):
    names = [self._network.names[l] for l in layers]
    return [randomness.layer_seed(self._p.random_seed, n) for n in names]

  def _count(self, layers):
    return sum(len(self._network.traces[l].weights) for l in layers)

  def _outside_weights(self, layers):
    """Returns entries of the weights of layers, and for each weight its own."""
    entries = [
      layout.spread(
        f'{self._network.names[l]}/{weight.name}',
        tf.TensorSpec(weight.shape, weight.dtype),
        self._mesh.num_stages,
      )
      for l in layers
      for weight in self._network.traces[l].weights
    ]
    return entries, list(range(len(entries)))


def stage_grid(shape: core.Shape, run: range) -> np.ndarray:
  """Returns the layers [stages, layers a core] of each core of the ring.

  With V circuits, core k has stages k, K + k, 2 K + k and so on.
  """
  V, n = shape.num_circuits, shape.layers_per_stage
  grid = np.array(run).reshape(V, shape.mesh.num_stages, n)
  return grid.transpose(1, 0, 2).reshape(shape.mesh.num_stages, V * n)


def _trace(task, p, layers, inputs, targets, size):
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
