"""How steps are made: by a graph of TensorFlow's, or by one XLA program.

The loop sees batches go in and metrics come out. The task's variables are what
is saved and evaluated; under the spmd engine they catch up when asked to.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, pipeline_task
from lingvo_gpipe.cluster import tpu
from lingvo_gpipe.engine import spmd
from lingvo_gpipe.engine.spmd import device_loop
from lingvo_gpipe.engine.spmd import state as state_lib


class Steps(Protocol):
  """Makes steps."""

  def run(self, data: tf.data.Iterator, count: int) -> list[Mapping]:
    """Makes a step, or several up to `count`; returns the metrics of each."""

  def settle(self) -> None:
    """Brings the variables up to date."""


class GraphSteps:
  """Steps of the mpmd engine, on the variables themselves."""

  def __init__(self, task: pipeline_task.PipelineTask):
    self._run = tf.function(task.TrainStep, autograph=False)

  def run(self, data, unused_count: int) -> list[Mapping]:
    return [self._run(next(data))]

  def settle(self) -> None:
    """The variables are up to date."""


class ProgramSteps:
  """Steps of the spmd engine, by XLA on virtual cores of this machine."""

  def __init__(
    self,
    program: spmd.Program,
    variables: Mapping[str, tf.Variable],
  ):
    """Compiles the program.

    Args:
      program: of the task.
      variables: all of the task's, by name; their values are where it starts.

    Raises:
      UserError: jax is missing.
    """
    try:
      from lingvo_gpipe import xla
      from lingvo_gpipe.xla import host
    except ImportError as error:
      raise errors.UserError(
        f'--engine=spmd: {error.name} is missing: install lingvo_gpipe[tpu].'
      ) from error
    self._program = program
    self._variables = variables
    state = _state_of(program, variables)
    self._run = host.HostRun(xla.lower(program), state)

  def run(self, data, unused_count: int) -> list[Mapping]:
    batch = next(data)
    return [self._run.step({key: np.asarray(t) for key, t in batch.items()})]

  def settle(self) -> None:
    _assign(self._program, self._run.state(), self._variables)


class TpuSteps:
  """Steps of the spmd engine on a TPU slice, several at a time."""

  def __init__(
    self,
    program: spmd.Program,
    variables: Mapping[str, tf.Variable],
    tpu_slice: tpu.Slice,
    steps_per_loop: int,
  ):
    """Puts the state on the cores.

    Args:
      program: of the task.
      variables: all of the task's, by name; their values are where it starts.
      tpu_slice: with as many cores as the program has.
      steps_per_loop: steps between two looks at the metrics, at most.
    """
    self._program = program
    self._variables = variables
    self._steps_per_loop = steps_per_loop
    self._loop = device_loop.DeviceLoop(
      program,
      _state_of(program, variables),
      tpu_slice.strategy,
      tpu_slice.devices,
    )

  def run(self, data, count: int) -> list[Mapping]:
    return self._loop.run(data, min(count, self._steps_per_loop))

  def settle(self) -> None:
    _assign(self._program, self._loop.state(), self._variables)


def _state_of(program, variables):
  values = {name: v.numpy() for name, v in variables.items()}
  return state_lib.pack(program, values)


def _assign(program, state, variables):
  shapes = {name: v.shape for name, v in variables.items()}
  for name, value in state_lib.unpack(program, state, shapes).items():
    variables[name].assign(value)
