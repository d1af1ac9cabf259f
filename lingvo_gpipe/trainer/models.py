"""Finds models by name."""

import contextlib
import difflib
import importlib
import io
import pkgutil

from lingvo import model_imports, model_registry

from lingvo_gpipe import errors

_ROOT = 'lingvo_gpipe.params'
# The registry's keys leave out "params.".
_KEY_PREFIX = 'lingvo_gpipe.'


def find(name: str) -> str:
  """Imports the module of a model and returns its key in Lingvo's registry.

  Args:
    name: `lm.byte_lm.Tiny` below this package's params, or the full name of a
      class of your own, such as `my_models.lm.Big`.

  Raises:
    UserError: there is no such model; close names are suggested.
  """
  if '.' in name:
    # Lingvo prints every place where it looks.
    with contextlib.redirect_stderr(io.StringIO()):
      model_imports.ImportParams(name, _ROOT, require_success=False)
  registered = _registered()
  for key in (_KEY_PREFIX + name, name):
    if key in registered:
      return key
  close = difflib.get_close_matches(name, list_names(), n=3, cutoff=0.4)
  hint = f' Did you mean {" or ".join(close)}?' if close else ''
  raise errors.UserError(
    f'--model={name}: no such model.{hint} --list_models prints all names; a '
    'module of your own must be importable (set PYTHONPATH) and use '
    '@model_registry.RegisterSingleTaskModel.'
  )


def list_names() -> list[str]:
  """Returns the names of all models of this package."""
  root = importlib.import_module(_ROOT)
  for module in pkgutil.walk_packages(root.__path__, _ROOT + '.'):
    importlib.import_module(module.name)
  return sorted(
    key.removeprefix(_KEY_PREFIX)
    for key in _registered()
    if key.startswith(_KEY_PREFIX)
  )


def _registered() -> dict:
  return model_registry._ModelRegistryHelper._MODEL_PARAMS
