"""From a task's Params to the training step of all cores.

Decides what the cores do: which layers are the stages, what is kept of their
inputs, which core holds what. Nothing is allocated.
"""

import dataclasses

import tensorflow as tf
from lingvo.core import base_layer

from lingvo_gpipe import (
  micro_batches,
  pipeline_task,
  pipelining_params,
  tied_weights,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.engine.spmd import (
  apply,
  core,
  equal_layers,
  fields,
  gradients,
  layout,
  step,
)
from lingvo_gpipe.engine.spmd import mesh as mesh_lib
from lingvo_gpipe.engine.spmd import parts as parts_lib


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
  network = _trace(task, layers, inputs, targets, size)
  # Says what is wrong with pairs of names.
  tied_weights.TiedWeights(p.tied_weights, network.names)
  run = equal_layers.find_run(network)
  maker = parts_lib.Maker(p, layers, network, inputs, size)
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


def _trace(task, layers, inputs, targets, size):
  specs = tf.nest.map_structure(
    lambda s: micro_batches.with_batch_size(s, 0, size), (inputs, targets)
  )
  # Tied weights count where they are used, too; parts.py finds their owners.
  return plan_lib.trace_network(
    layers, *specs, 0, pipeline_task.optimizer_of(task)
  )


def _entries(keys, specs):
  return tuple(
    layout.whole(key, tf.TensorSpec(spec.shape, spec.dtype))
    for key, spec in zip(keys, specs, strict=True)
  )
