"""Minds a run: starts chief and workers, notices losses, starts anew.

    start --> watch --> chief done: stop all
      ^         |
      |         '--> a worker is gone or silent, or the chief is gone
      '-- what is left of both is ended; workers of this machine are started
          again, others are waited for; the chief resumes from its newest
          checkpoint

A run that fails again and again without getting any further is given up.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import chief, health, local

# Seconds without an answer after which a worker counts as lost.
_SILENCE = 20.0
# Seconds between two rounds of asking, and for which an answer is waited for.
_ROUND = 2.0
_MOST_UNANSWERED = round(_SILENCE / (2 * _ROUND))
_MOST_FAILURES = 3


class _Lost(Exception):
  """A worker of this machine ends or hangs before the chief can start."""


class Supervisor:
  """Runs one chief at a time on a set of workers."""

  def __init__(
    self,
    chief_command: Callable[[dict[int, str]], Sequence[str]],
    addresses: Sequence[str],
    workers: local.LocalWorkers | None,
    wait: float,
    replan: bool,
    progress: Callable[[], int],
    say: Callable[[str], None],
  ):
    """Sets up; starts nothing yet.

    Args:
      chief_command: returns the chief's command line for workers by task.
      addresses: of workers that somebody else starts.
      workers: those on this machine to be started here; None for others.
      wait: seconds to wait for workers.
      replan: whether to go on without workers that stay away.
      progress: returns the step that the run has reached.
      say: tells the user.
    """
    self._chief_command = chief_command
    self._addresses = dict(enumerate(addresses))
    self._workers = workers
    self._wait = wait
    self._replan = replan
    self._progress = progress
    self._say = say
    self._chief = None
    # What each worker answered before the chief was started.
    self._statuses = {}
    self._stopping = False

  def run(self) -> int:
    """Runs until the chief is done; returns its exit status.

    Raises:
      UserError: workers do not answer, or the run fails without end.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._pass_on)
    furthest = self._progress()
    failures = 0
    try:
      while True:
        try:
          self._gather_workers()
          if self._stopping:
            return 1 if failures else 0
          status, lost = self._run_chief()
        except _Lost as error:
          status, lost = errors.EXIT_LOST_WORKER, str(error)
        if status == 0 or (status == errors.EXIT_USER_ERROR and not lost):
          return status
        what = lost or f'the trainer ended with {local.how_ended(status)}'
        if self._stopping:
          self._say(f'{what}; steps since the last checkpoint are lost')
          return 1 if lost or status > 0 else 128 - status
        self._say(what)
        reached = self._progress()
        failures = 1 if reached > furthest else failures + 1
        furthest = max(furthest, reached)
        if failures >= _MOST_FAILURES:
          raise errors.UserError(
            f'The run failed {failures} times in a row without getting any '
            f'further than step {furthest}; the last time: {what}.'
          )
        if self._workers:
          self._workers.stop()
        else:
          # Until then they hold what the chief had there.
          self._sleep(chief.FORGOTTEN_AFTER)
    finally:
      self._end_chief()
      if self._workers:
        self._workers.stop()

  def _run_chief(self) -> tuple[int, str | None]:
    """Returns a chief's exit status, and what is to be said of lost workers."""
    # Its own session: Ctrl-C is for the supervisor, which passes it on.
    self._chief = subprocess.Popen(
      self._chief_command(self._addresses), start_new_session=True
    )
    if self._stopping:  # The signal came when there was no chief.
      self._chief.terminate()
    lost = self._watch()
    status = self._end_chief()
    if lost is None and status not in (0, errors.EXIT_USER_ERROR):
      changes = health.changes(self._addresses, self._statuses)
      lost = '; '.join(changes) or None
    return status, lost

  def _sleep(self, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not self._stopping:
      time.sleep(0.2)

  def _gather_workers(self):
    """Starts workers, or waits for them, until all answer."""
    if self._workers:
      self._addresses = dict(enumerate(self._workers.start()))
    try:
      found = health.wait_for_all(
        self._addresses, self._wait, self._should_stop
      )
      self._statuses = {status.task: status for status in found}
    except health.NoAnswer as error:
      if self._workers:
        log = self._workers.log_of(error.task)
        raise _Lost(
          f'{error.what} (--worker_wait); its log is {log}'
        ) from error
      if not self._replan or self._stopping:
        raise
      self._addresses.pop(error.task)
      if not self._addresses:
        raise
      self._say(
        f'{error.what}. Going on with {len(self._addresses)} workers and a new '
        'plan.'
      )
      self._gather_workers()

  def _should_stop(self):
    if self._workers and (lost := self._workers.dead()):
      raise _Lost(lost)
    return self._stopping

  def _watch(self) -> str | None:
    """Returns which worker was lost; None once the chief has ended."""
    with health.Listener(self._addresses, _ROUND) as listener:
      while self._chief.poll() is None:
        time.sleep(0.2)
        if self._workers and (lost := self._workers.dead()):
          return lost
        for task, count in listener.unanswered().items():
          if count >= _MOST_UNANSWERED:
            return (
              f'worker {task} at {self._addresses[task]} has not answered for '
              f'{_SILENCE:.0f} seconds'
            )
    # A worker's end ends the chief, which may be noticed first.
    return self._workers.dead() if self._workers else None

  def _end_chief(self) -> int:
    if self._chief is None:
      return 0
    if self._chief.poll() is None:
      # It may be stuck in a step that will never end.
      self._chief.kill()
    return self._chief.wait()

  def _pass_on(self, number, unused_frame):
    self._stopping = True
    if self._chief is not None and self._chief.poll() is None:
      self._chief.send_signal(number)
