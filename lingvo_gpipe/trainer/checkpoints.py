"""Checkpoints: weights, optimizer slots, step and data cursor, by name.

Variables are saved under their own names, which come from layers and not from
stages, so a run can go on with any number of stages.
"""

import os

import tensorflow as tf

from lingvo_gpipe import errors

_SUFFIX = '/.ATTRIBUTES/VARIABLE_VALUE'
_VARIABLES = 'variables/'


class Checkpoints:
  """Saves and restores the state of a run in its logdir."""

  def __init__(
    self,
    logdir: str,
    variables: dict[str, tf.Variable],
    keep: int = 1,
    data: tf.data.Iterator | None = None,
  ):
    """Sets up; reads and writes nothing yet.

    Args:
      logdir: folder of the run.
      variables: all state but the data, by name.
      keep: how many checkpoints to keep.
      data: the iterator whose position is saved too; None to leave it.
    """
    self._variables = {_key(name): v for name, v in variables.items()}
    extra = {} if data is None else {'data': data}
    checkpoint = tf.train.Checkpoint(variables=self._variables, **extra)
    self._checkpoint = checkpoint
    self._manager = tf.train.CheckpointManager(checkpoint, logdir, keep)

  def save(self, step: int) -> str:
    """Saves everything and returns the path."""
    return self._manager.save(checkpoint_number=step)

  def restore(self, path: str) -> None:
    """Restores a checkpoint after checking that it is one of this model.

    Raises:
      UserError: other variables or shapes than the model's.
    """
    self._check(path)
    # A checkpoint has a position of the data; an evaler does not ask for it.
    self._checkpoint.restore(path).assert_existing_objects_matched()

  def _check(self, path):
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    saved = {
      _unescape(key.removeprefix(_VARIABLES).removesuffix(_SUFFIX)): shape
      for key, shape in shapes.items()
      if key.startswith(_VARIABLES)
    }
    wanted = {key: v.shape.as_list() for key, v in self._variables.items()}
    differing = sorted(
      key
      for key in saved.keys() | wanted.keys()
      if saved.get(key) != wanted.get(key)
    )
    if differing:
      key = differing[0]
      raise errors.UserError(
        f'{path} is a checkpoint of another model: {len(differing)} variables '
        f'differ, such as {key} (saved: {saved.get(key, "none")}, this model: '
        f'{wanted.get(key, "none")}). Choose another --logdir, or the --model '
        'and overrides with which it was saved.'
      )


def latest(logdir: str) -> str | None:
  """Returns the path of the newest checkpoint in `logdir`, if any."""
  return tf.train.latest_checkpoint(logdir)


def step_of(path: str) -> int:
  """Returns the step at which a checkpoint was saved."""
  return int(os.path.basename(path).rpartition('-')[2])


def _key(name: str) -> str:
  """Returns a variable's name as one part of a checkpoint's keys."""
  return name.removesuffix(':0').replace('/', '-')


def _unescape(key: str) -> str:
  """Undoes TensorFlow's escape of dots in a part of a key."""
  return key.replace('..', '.')
