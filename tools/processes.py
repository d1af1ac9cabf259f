"""Looks at runs from outside: their child processes, memory and losses."""

import contextlib
import json
import pathlib
import re


def children(pid: int, marker: str) -> list[int]:
  """Returns the children of a process that have `marker` in their command."""
  found = []
  with contextlib.suppress(OSError):  # It has just ended.
    path = pathlib.Path(f'/proc/{pid}/task/{pid}/children')
    for child in path.read_text('ascii').split():
      with contextlib.suppress(OSError):
        if marker in pathlib.Path(f'/proc/{child}/cmdline').read_text('utf-8'):
          found.append(int(child))
  return found


def peak_bytes(pid: int) -> int:
  """Returns the most memory that a process has had resident.

  Raises:
    ProcessLookupError: it has ended.
  """
  return _bytes(pid, 'VmHWM')


def resident_bytes(pid: int) -> int:
  """Returns the memory that a process has resident.

  Raises:
    ProcessLookupError: it has ended.
  """
  return _bytes(pid, 'VmRSS')


def losses(logdir: pathlib.Path) -> list[float]:
  """Returns the losses of all steps that are in a run's metrics."""
  path = logdir / 'metrics.jsonl'
  if not path.exists():
    return []
  rows = path.read_text('utf-8').split('\n')
  return [json.loads(row)['loss'] for row in rows[:-1]]


def _bytes(pid, field):
  try:
    status = pathlib.Path(f'/proc/{pid}/status').read_text('ascii')
    return int(re.search(rf'{field}:\s+(\d+)', status).group(1)) * 1024
  except (OSError, AttributeError) as error:  # A zombie has no such field.
    raise ProcessLookupError(pid) from error
