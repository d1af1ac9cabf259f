"""Files of measured layer times: `python -m lingvo_gpipe.plan --profile=F`."""

import dataclasses
import json
from collections.abc import Mapping

from lingvo_gpipe import errors
from lingvo_gpipe.plan import machine as machine_lib

_FIELDS = [f.name for f in dataclasses.fields(machine_lib.LayerSeconds)]


def write(
  path: str,
  measured: Mapping[str, machine_lib.LayerSeconds],
  names: Mapping[str, str],
  update_seconds: float,
) -> None:
  """Writes measured times as JSON, for `read`.

  Args:
    path: of the file.
    measured: seconds by key of a layer.
    names: of a layer with that key, for people.
    update_seconds: of the update, for each byte of trained weights.

  Raises:
    UserError: the file cannot be written.
  """
  layers = {
    key: {'layer': names[key], **dataclasses.asdict(times)}
    for key, times in measured.items()
  }
  content = {'update_seconds': update_seconds, 'layers': layers}
  try:
    with open(path, 'w', encoding='utf-8') as file:
      json.dump(content, file, indent=1)
  except OSError as error:
    raise errors.UserError(f'profile={path}: {error.strerror}.') from error


def read(path: str, machine: machine_lib.Machine) -> machine_lib.Machine:
  """Returns `machine` with the times of a file.

  Raises:
    UserError: it cannot be read, or holds nonsense.
  """
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
    measured = {
      key: _layer_seconds(path, layer)
      for key, layer in content['layers'].items()
    }
    update_seconds = float(content['update_seconds'])
  except OSError as error:
    raise errors.UserError(f'profile={path}: {error.strerror}.') from error
  except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
    raise errors.UserError(
      f'profile={path} is no profile ({error}): make one with python -m '
      'lingvo_gpipe.plan --profile=FILE.'
    ) from error
  return dataclasses.replace(
    machine, measured=measured, update_seconds=update_seconds
  )


def _layer_seconds(path, layer) -> machine_lib.LayerSeconds:
  times = {field: float(layer[field]) for field in _FIELDS}
  for field, value in times.items():
    if not 0 <= value < float('inf'):
      raise errors.UserError(
        f'profile={path}: layer "{layer["layer"]}" has {field}={value}; '
        'seconds from 0 on are needed.'
      )
  return machine_lib.LayerSeconds(**times)
