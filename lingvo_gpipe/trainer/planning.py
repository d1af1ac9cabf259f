"""Lets the planner settle what flags and Params leave open."""

import dataclasses
import os
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import (
  errors,
  micro_batches,
  pipeline_task,
  pipelining_params,
  profiling,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.plan import search


def num_devices(pipeline, given: int | None) -> int:
  """Returns how many devices one replica may use, before TensorFlow starts.

  Args:
    pipeline: Params of the PipeliningLayer, flags applied.
    given: for all replicas, by the user, or None.

  Raises:
    UserError: fewer are given than there are replicas.
  """
  replicas = pipeline.num_replicas
  if given:
    if given < replicas:
      raise errors.UserError(
        f'num_replicas={replicas}, but --num_devices={given}: set num_replicas '
        f'to {given} or less, or --num_devices to {replicas} or more.'
      )
    return given // replicas
  if not pipelining_params.open_fields(pipeline):
    return pipelining_params.num_devices(pipeline)
  if search.AUTO != pipeline.num_stages:
    return pipelining_params.num_stages(pipeline)
  found = len(tf.config.list_physical_devices('GPU')) or os.cpu_count()
  return max(1, found // replicas)


def planner(task, devices: int) -> search.Planner:
  """Returns a planner for what a task leaves open, on unlimited devices.

  Args:
    task: Params of a PipelineTask with its input.
    devices: how many there are.
  """
  p = task.pipeline
  spec = task.input.Instantiate().datasource.GetDataset().element_spec
  inputs, targets = pipeline_task.split_batch(task, spec)
  shares = micro_batches.shares(
    p, micro_batches.batch_size(inputs, p.batch_dim)
  )
  # Every replica must have an example for each of the micro-batches chosen.
  is_open = p.num_micro_batches == search.AUTO
  batch_size = shares[-1 if is_open else 0]
  layers, cuts = pipelining_params.list_layers(p)

  def trace(size):
    specs = tf.nest.map_structure(
      lambda s: micro_batches.with_batch_size(s, p.batch_dim, size),
      (inputs, targets),
    )
    return plan_lib.trace_network(
      layers,
      *specs,
      p.batch_dim,
      pipeline_task.optimizer_of(task),
      p.tied_weights,
    )

  wish = search.Wish(
    num_devices=devices,
    batch_size=batch_size,
    num_stages=len(p.cell_tpl) or p.num_stages,
    num_micro_batches=p.num_micro_batches,
    schedule=p.schedule,
    virtual_stages=p.virtual_stages,
    schedule_file=p.schedule_file,
    remat=p.remat,
    cuts=cuts and tuple(cuts),
  )
  if p.micro_batch_size:
    sizes = micro_batches.sizes(p, batch_size)
    wish = dataclasses.replace(wish, num_micro_batches=len(sizes))
  return search.Planner(trace, plan_lib.Machine(), wish)


def profile(
  task,
  planner: search.Planner,
  path: str,
  devices: int,
  progress: Callable[[str], None],
) -> None:
  """Measures the layers that the profile in `path` lacks.

  Args:
    task: Params of a PipelineTask.
    planner: for it.
    path: of the profile, made if missing.
    devices: how many work at once.
    progress: told what is being measured.
  """
  p = task.pipeline
  layers, _ = pipelining_params.list_layers(p)
  kind = 'GPU' if tf.config.list_physical_devices('GPU') else 'CPU'
  names = [d.name for d in tf.config.list_logical_devices(kind)][:devices]
  if kind == 'CPU':
    names = names[: os.cpu_count()]
  profiling.measure_missing(
    planner.networks(),
    layers,
    pipeline_task.optimizer_of(task),
    p.batch_dim,
    p.loss_name,
    path,
    names,
    progress,
  )


def settle(pipeline, found: search.Found) -> None:
  """Writes what the planner chose into the Params."""
  for field in pipelining_params.open_fields(pipeline):
    pipeline.Set(**{field: getattr(found.choice, field)})
