"""Stops a run between two steps when the system or the user asks for it."""

import signal


class StopRequest:
  """Notes SIGTERM and SIGINT; a second SIGINT interrupts at once."""

  def __init__(self):
    self.signal_name = None
    signal.signal(signal.SIGTERM, self._note)
    signal.signal(signal.SIGINT, self._note)

  def _note(self, number, unused_frame):
    self.signal_name = signal.Signals(number).name
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def __call__(self) -> bool:
    return self.signal_name is not None
