"""How a step is made: by a graph of TensorFlow's, or by one XLA program.

The loop sees batches go in and metrics come out. The task's variables are what
is saved and evaluated; under the spmd engine they catch up when asked to.
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, pipeline_task
from lingvo_gpipe.engine import spmd
from lingvo_gpipe.engine.spmd import state as state_lib


class GraphSteps:
  """Steps of the mpmd engine, on the variables themselves."""

  def __init__(self, task: pipeline_task.PipelineTask):
    self.run = tf.function(task.TrainStep, autograph=False)

  def settle(self) -> None:
    """Brings the variables up to date: they are."""


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
    values = {name: v.numpy() for name, v in variables.items()}
    state = state_lib.pack(program, values)
    self._run = host.HostRun(xla.lower(program), state)

  def run(self, batch) -> dict[str, float]:
    """Makes a step; returns its metrics."""
    return self._run.step({key: np.asarray(t) for key, t in batch.items()})

  def settle(self) -> None:
    """Brings the variables up to date."""
    shapes = {name: v.shape for name, v in self._variables.items()}
    values = state_lib.unpack(self._program, self._run.state(), shapes)
    for name, value in values.items():
      self._variables[name].assign(value)
