"""Workers on this machine, as processes, each with its share of the cores."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence


class LocalWorkers:
  """Starts and ends worker processes, and tells which of them died."""

  def __init__(self, command: Callable[[int], Sequence[str]], count: int):
    """Sets up.

    Args:
      command: returns the command line of a worker by its task.
      count: how many.
    """
    self._command = command
    self._count = count
    self._processes = []
    self.log_folder = tempfile.mkdtemp(prefix='lingvo_gpipe-workers-')

  def start(self) -> None:
    """Starts all of them, in place of any that there were."""
    self.stop()
    shares = shares_of_cores(self._count)
    for task in range(self._count):
      path = os.path.join(self.log_folder, f'worker-{task}.log')
      with open(path, 'ab') as log:
        process = subprocess.Popen(
          self._command(task),
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          start_new_session=True,  # Ctrl-C is not for them.
        )
      os.sched_setaffinity(process.pid, shares[task])
      self._processes.append(process)

  def dead(self) -> str | None:
    """Returns what is to be said of a worker that has ended, if any has."""
    for task, process in enumerate(self._processes):
      if process.poll() is not None:
        status = process.returncode
        how = f'status {status}'
        if status < 0:
          how = signal.Signals(-status).name
        return (
          f'worker {task} (process {process.pid}) has ended with {how}; its '
          f'log is {self.log_folder}/worker-{task}.log'
        )
    return None

  def stop(self) -> None:
    """Ends all of them, those that are stopped or stuck too."""
    for process in self._processes:
      process.kill()
    for process in self._processes:
      process.wait()
    self._processes = []


def shares_of_cores(count: int) -> list[set[int]]:
  """Returns the cores of each of `count` processes, at least one each."""
  cores = sorted(os.sched_getaffinity(0))
  shares = []
  for task in range(count):
    first = task * len(cores) // count
    stop = max((task + 1) * len(cores) // count, first + 1)
    shares.append(set(cores[first:stop]))
  return shares
