"""Checkpoints: weights, optimizer slots, step and data cursor, by name.

Variables are saved under their own names, which come from layers and not from
stages, so a run can go on with any number of stages.
"""

import contextlib
import glob
import os
from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe import errors

_SUFFIX = '/.ATTRIBUTES/VARIABLE_VALUE'
_VARIABLES = 'variables/'
# What TensorFlow raises for files that are cut short, altered or gone.
_UNREADABLE = (
  tf.errors.DataLossError,
  tf.errors.NotFoundError,
  tf.errors.OutOfRangeError,
  IndexError,
  RuntimeError,
)


class Damaged(Exception):
  """A checkpoint that cannot be read."""


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
    # All is written by this process, so workers need no shared disk.
    self._options = tf.train.CheckpointOptions(
      experimental_io_device='/device:CPU:0'
    )
    self._manager = tf.train.CheckpointManager(checkpoint, logdir, keep)

  def save(self, step: int) -> str:
    """Saves everything and returns the path."""
    return self._manager.save(step, options=self._options)

  def restore(self, path: str) -> None:
    """Restores a checkpoint after checking that it is one of this model.

    Raises:
      Damaged: it cannot be read.
      UserError: other variables or shapes than the model's.
    """
    try:
      self._check(path)
      restored = self._checkpoint.restore(path, self._options)
    except (*_UNREADABLE, tf.errors.OpError) as error:
      # Of itself, no subclass, where it is told of damage by a message alone.
      if isinstance(error, _UNREADABLE) or type(error) is tf.errors.OpError:
        raise Damaged(f'{path} is damaged ({_first_line(error)})') from error
      raise
    # A checkpoint has a position of the data; an evaler does not ask for it.
    restored.assert_existing_objects_matched()

  def restore_newest(
    self, logdir: str, say: Callable[[str], None]
  ) -> str | None:
    """Restores the newest checkpoint that can be read; returns its path.

    Args:
      logdir: folder with checkpoints.
      say: told of damaged ones.

    Returns:
      The path; None if the run was killed while it saved its first checkpoint,
      so that there is nothing to go on from and nothing is lost.

    Raises:
      UserError: none can be read, or it is of another model.
    """
    found = paths(logdir)
    for path in reversed(found):
      try:
        self.restore(path)
        return path
      except Damaged as error:
        say(f'warning: {error}; taking the one before it')
    got_further = os.path.exists(os.path.join(logdir, 'metrics.jsonl'))
    if not got_further and [step_of(path) for path in found] == [0]:
      return None
    raise errors.UserError(
      f'--logdir={logdir}: no checkpoint can be read. Bring one back from a '
      'copy, or choose another folder to start anew.'
    )

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


def remove_leftovers(logdir: str) -> None:
  """Removes what runs left that were killed while they saved a checkpoint."""
  for folder in glob.glob(os.path.join(glob.escape(logdir), 'ckpt-*_temp')):
    for part in glob.glob(os.path.join(glob.escape(folder), 'part-*')):
      os.remove(part)
    with contextlib.suppress(OSError):  # It holds something that is not ours.
      os.rmdir(folder)


def latest(logdir: str) -> str | None:
  """Returns the path of the newest checkpoint in `logdir`, if any."""
  return max(paths(logdir), key=step_of, default=None)


def paths(logdir: str) -> list[str]:
  """Returns the paths of all checkpoints in `logdir`, oldest first.

  A checkpoint is there once its index is, which is written last.
  """
  indices = glob.glob(os.path.join(glob.escape(logdir), 'ckpt-*.index'))
  return sorted((i.removesuffix('.index') for i in indices), key=step_of)


def step_of(path: str) -> int:
  """Returns the step at which a checkpoint was saved."""
  return int(os.path.basename(path).rpartition('-')[2])


def _first_line(error) -> str:
  return str(error).partition('\n')[0]


def _key(name: str) -> str:
  """Returns a variable's name as one part of a checkpoint's keys."""
  return name.removesuffix(':0').replace('/', '-')


def _unescape(key: str) -> str:
  """Undoes TensorFlow's escape of dots in a part of a key."""
  return key.replace('..', '.')
