"""The folder of a run: whether it may be used, and by one run at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from lingvo_gpipe import errors
from lingvo_gpipe.trainer import checkpoints

# Files of a run that a foreign logdir could hold by accident.
_RUN_FILES = ('params.txt', 'plan.txt', 'metrics.jsonl', 'eval.jsonl')
_LOCK = '.lock'


@contextlib.contextmanager
def opened(logdir: str) -> Iterator[bool]:
  """Makes `logdir` if missing, and keeps other runs out of it meanwhile.

  Yields:
    Whether it has a run to go on with.

  Raises:
    UserError: it cannot be written, or another run is writing there, or it
      holds files that no run of ours made: a run saves a checkpoint before it
      writes anything else.
  """
  try:
    os.makedirs(logdir, exist_ok=True)
  except OSError as error:
    raise errors.UserError(f'--logdir={logdir}: {error.strerror}.') from error
  if not os.access(logdir, os.W_OK | os.X_OK):
    raise errors.UserError(f'--logdir={logdir} is not writable.')
  found = [f for f in _RUN_FILES if os.path.exists(os.path.join(logdir, f))]
  if found and not checkpoints.paths(logdir):
    raise errors.UserError(
      f'--logdir={logdir} holds {", ".join(found)} but no checkpoint, so it is '
      'not a run that can go on: choose another folder.'
    )
  with open(os.path.join(logdir, _LOCK), 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise errors.UserError(
        f'--logdir={logdir}: another run is writing there. Wait for its end, '
        'or choose another folder.'
      ) from error
    except OSError:
      pass  # There are file systems without locks.
    yield bool(checkpoints.paths(logdir))
