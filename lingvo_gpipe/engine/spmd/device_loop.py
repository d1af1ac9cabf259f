"""Steps in a row on the cores, between two looks of the host.

    host      next(data)  next(data)  next(data)        reads the metrics
    cores     step 1      step 2      step 3      ...   of all steps

The state stays on the cores. Batches come from tf.data inside the same
function, so Python is asked nothing until the loop has ended.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_gpipe.engine.spmd import program as program_lib
from lingvo_gpipe.engine.spmd import slices


class DeviceLoop:
  """Holds the state of a run on the cores of a tf.distribute strategy."""

  def __init__(
    self,
    program: program_lib.Program,
    state: Sequence[np.ndarray],
    strategy: tf.distribute.Strategy,
    devices: Sequence[str],
  ):
    """Puts the state on the cores.

    Args:
      program: of the task.
      state: whole arrays, as in `program.step.state`.
      strategy: of one replica, which has all cores.
      devices: of the cores.
    """
    self._program = program
    self._strategy = strategy
    self._variables = [
      slices.SlicedVariable(program.mesh, entry, array, devices)
      for entry, array in zip(program.step.state, state, strict=True)
    ]
    # TPUStrategy compiles by XLA whatever it runs.
    by_itself = isinstance(strategy, tf.distribute.TPUStrategy)
    self._compiled = tf.function(
      program.run, jit_compile=None if by_itself else True, autograph=False
    )
    self._loop = tf.function(self._steps, autograph=False)

  def run(self, data: tf.data.Iterator, count: int) -> list[dict[str, float]]:
    """Makes steps on the next batches; returns the metrics of each.

    Args:
      data: yields NestedMaps.
      count: how many steps.
    """
    columns = self._loop(data, tf.constant(count))
    columns = [column.numpy().tolist() for column in columns]
    return [
      dict(zip(self._names, row, strict=True))
      for row in zip(*columns, strict=True)
    ]

  def state(self) -> list[np.ndarray]:
    """Returns the state as whole arrays."""
    return [variable.numpy() for variable in self._variables]

  def step(self, batch: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs a step on all cores, inside the strategy; returns the metrics."""
    state = [variable.read() for variable in self._variables]
    results = self._compiled(*state, *batch)
    for variable, value in zip(
      self._variables, results[: len(state)], strict=True
    ):
      variable.assign(value)
    return results[len(state) :]

  def _steps(self, data, count):
    entries = [*self._program.inputs, *self._program.targets]

    def body(number, columns):
      batch = next(data)
      arguments = [batch[entry.name] for entry in entries]
      metrics = self._strategy.run(self.step, args=(arguments,))
      row = [
        self._strategy.experimental_local_results(value)[0] for value in metrics
      ]
      return number + 1, [
        column.write(number, value)
        for column, value in zip(columns, row, strict=True)
      ]

    columns = [tf.TensorArray(tf.float32, count) for _ in self._names]
    _, columns = tf.while_loop(
      lambda number, _: number < count,
      body,
      (tf.constant(0), columns),
      parallel_iterations=1,
    )
    return [column.stack() for column in columns]

  @property
  def _names(self):
    return self._program.step.scalars
