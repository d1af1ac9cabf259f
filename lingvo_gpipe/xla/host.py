"""Runs a lowered step for numbers, on virtual cores of this machine.

`environment.prepare(8)` must come before jax is imported anywhere.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import sharding

from lingvo_gpipe.engine.spmd import mesh as mesh_lib
from lingvo_gpipe.xla import executable
from lingvo_gpipe.xla import lowered as lowered_lib

_AXES = {mesh_lib.STAGE: 'stage', mesh_lib.REPLICA: 'replica'}


class HostRun:
  """Holds the state of a run, in slices, and makes steps."""

  def __init__(self, lowered: lowered_lib.Lowered, state: Sequence[np.ndarray]):
    """Compiles, and puts the state on the cores.

    Args:
      lowered: the step.
      state: whole arrays, as in `lowered.state`.
    """
    self._lowered = lowered
    mesh = lowered.mesh
    devices = jax.devices('cpu')[: mesh.num_cores]
    grid = np.array(devices).reshape(mesh.num_stages, mesh.num_replicas)
    self._mesh = sharding.Mesh(grid, tuple(_AXES.values()))
    self._executable = executable.compile_step(lowered, devices)
    self._state = [
      self._place(entry, array)
      for entry, array in zip(lowered.state, state, strict=True)
    ]

  def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Makes a step and returns its metrics."""
    arguments = [
      self._place(entry, batch[entry.name]) for entry in self._lowered.batch
    ]
    results = self._executable.execute_sharded([*self._state, *arguments])
    results = results.disassemble_into_single_device_arrays()
    count = len(self._state)
    self._state = [
      jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts)
      for old, parts in zip(self._state, results[:count], strict=True)
    ]
    values = [float(np.asarray(parts[0])) for parts in results[count:]]
    return dict(zip(self._lowered.metrics, values, strict=True))

  def state(self) -> list[np.ndarray]:
    """Returns the state as whole arrays."""
    return [np.asarray(array) for array in self._state]

  def text(self) -> str:
    """Returns the optimised program."""
    [module] = self._executable.hlo_modules()
    return module.to_string()

  def _place(self, entry, array):
    axes = [None if axis is None else _AXES[axis] for axis in entry.split]
    spec = sharding.PartitionSpec(*axes)
    placement = sharding.NamedSharding(self._mesh, spec)
    # int64 arrays stay what they are.
    with jax.enable_x64(True):
      return jax.device_put(np.asarray(array), placement)
