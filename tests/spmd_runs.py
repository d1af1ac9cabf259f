"""Runs of one model under both engines, step by step."""

import functools

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import xla
from lingvo_gpipe.engine import spmd
from lingvo_gpipe.engine.spmd import state as state_lib


def make_params(model, **pipeline):
  """Returns Params of a task with dropout from the hash."""
  p = model().Task().Set(random_seed=1)
  p.input = model().Train().Set(random_seed=1)
  p.pipeline.Set(**{'random_bits': 'hash', **pipeline})
  return p


def batches(p, count: int) -> list:
  data = iter(p.input.Instantiate().datasource.GetDataset())
  return [next(data) for _ in range(count)]


def values(variables) -> dict[str, np.ndarray]:
  return {name: v.numpy() for name, v in variables.items()}


@functools.cache
def mpmd_run(model, steps: int):
  """Returns (variables before, losses, variables after step 1, at the end)."""
  p = make_params(model, num_stages=2, schedule='gpipe')
  task = p.Instantiate()
  variables = task.CreateSlots()
  py_utils.GetGlobalStep().assign(0)
  start = values(variables)
  step = tf.function(task.TrainStep, autograph=False)
  losses, after_one = [], None
  for batch in batches(p, steps):
    losses.append(float(step(batch).loss))
    after_one = after_one or values(variables)
  return start, losses, after_one, values(variables)


def build(model, **pipeline):
  """Returns the spmd program of a model."""
  p = make_params(model, **pipeline)
  spec = p.input.Instantiate().datasource.GetDataset().element_spec
  return p, spmd.build(p, spec)


def spmd_run(model, steps: int, start, **pipeline):
  """Returns the same as mpmd_run but the start, and the program."""
  from lingvo_gpipe.xla import host

  p, program = build(model, **pipeline)
  run = host.HostRun(xla.lower(program), state_lib.pack(program, start))
  shapes = {name: value.shape for name, value in start.items()}
  losses, after_one = [], None
  for batch in batches(p, steps):
    arrays = {key: t.numpy() for key, t in batch.items()}
    losses.append(run.step(arrays)['loss'])
    after_one = after_one or state_lib.unpack(program, run.state(), shapes)
  return losses, after_one, state_lib.unpack(program, run.state(), shapes)


def gradient_difference(one, other) -> float:
  """Returns how far gradients differ, in relative norm, by Adam's averages."""
  names = [name for name in one if name.endswith('/Adam:0')]
  a = np.concatenate([one[name].ravel() for name in names])
  b = np.concatenate([other[name].ravel() for name in names])
  return float(np.linalg.norm(a - b) / np.linalg.norm(a))
