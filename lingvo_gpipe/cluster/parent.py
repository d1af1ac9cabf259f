"""Whether the supervisor that started this process is still there."""

import os
import signal
import threading
import time


def is_gone(supervisor: int | None) -> bool:
  """Returns whether this process has outlived its supervisor.

  Args:
    supervisor: its process id, as it passed it on: it may have ended before
      this process could ask. None if there is none.
  """
  return supervisor is not None and os.getppid() != supervisor


def stop_with(supervisor: int) -> None:
  """Stops this process as by SIGTERM once its supervisor is gone.

  Another supervisor would start another chief in the same logdir.
  """

  def watch():
    while not is_gone(supervisor):
      time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, daemon=True).start()
