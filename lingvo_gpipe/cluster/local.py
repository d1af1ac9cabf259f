"""Workers on this machine, as processes, each with its share of the cores."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence

from lingvo_gpipe.cluster import addresses as addresses_lib


class LocalWorkers:
  """Starts and ends worker processes, and tells which of them died."""

  def __init__(
    self, command: Callable[[int, Sequence[str]], Sequence[str]], count: int
  ):
    """Sets up.

    Args:
      command: returns the command line of a worker by its task and the
        addresses of all.
      count: how many.
    """
    self._command = command
    self._count = count
    self._processes = []
    self.log_folder = tempfile.mkdtemp(prefix='lingvo_gpipe-workers-')

  def start(self) -> list[str]:
    """Starts all of them, in place of any that there were.

    Returns:
      Their addresses, new ones at every start: somebody else may have taken
      those of before.
    """
    self.stop()
    found = addresses_lib.free_local(self._count)
    shares = shares_of_cores(self._count)
    for task in range(self._count):
      with open(self.log_of(task), 'ab') as log:
        process = subprocess.Popen(
          self._command(task, found),
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          start_new_session=True,  # Ctrl-C is not for them.
        )
      self._processes.append(process)
      os.sched_setaffinity(process.pid, shares[task])
    return found

  def log_of(self, task: int) -> str:
    """Returns the path of the file that has what a worker printed."""
    return os.path.join(self.log_folder, f'worker-{task}.log')

  def dead(self) -> str | None:
    """Returns what is to be said of a worker that has ended, if any has."""
    for task, process in enumerate(self._processes):
      if process.poll() is not None:
        return (
          f'worker {task} (process {process.pid}) has ended with '
          f'{how_ended(process.returncode)}; its log is {self.log_of(task)}'
        )
    return None

  def stop(self) -> None:
    """Ends all of them, those that are stopped or stuck too."""
    for process in self._processes:
      process.kill()
    for process in self._processes:
      process.wait()
    self._processes = []

  def remove_logs(self) -> None:
    """Removes the folder of logs, after a run that went well."""
    shutil.rmtree(self.log_folder, ignore_errors=True)


def how_ended(status: int) -> str:
  """Returns what the exit status of a child process means."""
  return signal.Signals(-status).name if status < 0 else f'status {status}'


def shares_of_cores(count: int) -> list[set[int]]:
  """Returns the cores of each of `count` processes, at least one each."""
  cores = sorted(os.sched_getaffinity(0))
  shares = []
  for task in range(count):
    first = task * len(cores) // count
    stop = max((task + 1) * len(cores) // count, first + 1)
    shares.append(set(cores[first:stop]))
  return shares
