"""State between the two engines: arrays of all layers, variables of each.

Checkpoints know variables alone, so a run can go on under either engine.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from lingvo_gpipe.engine.spmd import program as program_lib


def pack(
  program: program_lib.Program, variables: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
  """Returns the program's state.

  Args:
    program: of the task.
    variables: values by name, as from PipelineTask.CreateSlots.
  """
  find = _Finder(variables)
  state = []
  for entry in program.step.state:
    array = np.zeros(entry.spec.shape, entry.spec.dtype.as_numpy_dtype)
    for path, place in _places(program, entry):
      value = np.asarray(variables[find(path)])
      array[place] = value.reshape(array[place].shape)
    state.append(array)
  return state


def unpack(
  program: program_lib.Program,
  state: Iterable[np.ndarray],
  shapes: Mapping[str, tuple],
) -> dict[str, np.ndarray]:
  """Returns values by name, for the variables of a PipelineTask.

  Args:
    program: of the task.
    state: as from `pack`.
    shapes: of the variables, by name.
  """
  find = _Finder(shapes)
  values = {}
  for entry, array in zip(program.step.state, state, strict=True):
    for path, place in _places(program, entry):
      name = find(path)
      values[name] = array[place].reshape(shapes[name])
  return values


def _places(program, entry):
  """Yields each variable in an array, by its path, and where it is."""
  weights = {e.name for e in program.step.weights}
  weight, slot = entry.name, ''
  if weight not in weights:
    weight, _, slot = entry.name.rpartition('/')
    slot = f'/{slot}'
  if weight not in program.rows:
    yield entry.name, ()
    return
  for core, rows in enumerate(program.rows[weight]):
    for number, row in enumerate(rows):
      start = 0
      for path, shape in row:
        stop = start + math.prod(shape)
        # A row of one weight has its shape; one of several is flat.
        is_flat = entry.spec.shape.rank == 3 and len(row) > 1
        part = slice(start, stop) if is_flat else Ellipsis
        yield path + slot, (core, number, part)
        start = stop


class _Finder:
  """Finds variables by the path of a weight or a slot.

  `block_000/qkv/Adam` is `lm/loss/pipeline/block_000/qkv/var/Adam:0`.
  """

  def __init__(self, names):
    self._names = {}
    for name in names:
      path = name.removesuffix(':0').split('/')
      path = [part for part in path if part != 'var']
      for start in range(len(path)):
        self._names.setdefault('/'.join(path[start:]), name)

  def __call__(self, path):
    return self._names[path]
