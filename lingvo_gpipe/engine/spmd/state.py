"""State between the two engines: arrays of all layers, variables of each.

Checkpoints know variables alone, so a run can go on under either engine.
"""

from collections.abc import Mapping

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
  return [
    _pack_entry(program, entry, lambda path: variables[find(path)])
    for entry in program.step.state
  ]


def unpack(
  program: program_lib.Program,
  state: list[np.ndarray],
  names: Mapping,
) -> dict[str, np.ndarray]:
  """Returns values by name, for the variables of a PipelineTask.

  Args:
    program: of the task.
    state: as from `pack`.
    names: the variables' names are its keys.
  """
  find = _Finder(names)
  values = {}
  for entry, array in zip(program.step.state, state, strict=True):
    prefix, _, rest = entry.name.partition('/')
    if prefix != program_lib.STAGES:
      values[find(entry.name)] = array
      continue
    for row, layers in zip(array, program.stage_layers, strict=True):
      for value, layer in zip(row, layers, strict=True):
        values[find(f'{layer}/{rest}')] = value
  return values


def _pack_entry(program, entry, value_of):
  prefix, _, rest = entry.name.partition('/')
  if prefix != program_lib.STAGES:
    return np.asarray(value_of(entry.name))
  return np.array(
    [
      [value_of(f'{layer}/{rest}') for layer in layers]
      for layers in program.stage_layers
    ]
  )


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
