"""What a run takes beside what its plan promised: seconds and bytes."""

import pathlib
import re

import tensorflow as tf

from lingvo_gpipe import devices
from lingvo_gpipe import plan as plan_lib

# Steps of a process after which the figures are settled enough to be told.
_STEPS_TO_SETTLE = 3


class Usage:
  """Measures steps and memory of this process against a forecast.

  Memory is that of the hungriest GPU; without GPUs that of the whole process
  beyond what it took before, and all devices of the plan together. Of workers
  it knows nothing.
  """

  def __init__(self):
    """Starts to measure: call it before weights are made."""
    self._before = _peak_resident()
    self._forecast = None
    self._num_replicas = 1
    self._knows_seconds = False
    self._steps = 0

  def expect(
    self,
    forecast: plan_lib.Forecast,
    machine: plan_lib.Machine,
    num_replicas: int = 1,
  ) -> None:
    """Notes what is promised; seconds only if they come from a profile.

    Args:
      forecast: of one replica.
      machine: whose profile it comes from, if any.
      num_replicas: that run.
    """
    self._forecast = forecast
    self._num_replicas = num_replicas
    self._knows_seconds = bool(machine.measured)

  def row(self) -> dict[str, float]:
    """Returns metrics of a step that has just run."""
    self._steps += 1
    row = {}
    if not devices.are_remote():
      row['memory_bytes'] = self._memory()
      row['memory_bytes_planned'] = self._memory_planned()
    if self._knows_seconds:
      row['step_seconds_planned'] = self._forecast.step_seconds
    return row

  def is_settled(self) -> bool:
    """Returns true once, when figures can be told."""
    return self._steps == _STEPS_TO_SETTLE

  def _memory(self):
    if gpus := tf.config.list_logical_devices('GPU'):
      infos = [tf.config.experimental.get_memory_info(g.name) for g in gpus]
      return max(info['peak'] for info in infos)
    return _peak_resident() - self._before

  def _memory_planned(self):
    forecast = self._forecast
    if tf.config.list_logical_devices('GPU'):
      return max(forecast.device_bytes)
    # CPU devices send values by reference: all replicas read the same weights.
    once = sum(s.bytes['weights'] + s.bytes['slots'] for s in forecast.stages)
    of_replica = sum(forecast.device_bytes) - once
    return once + self._num_replicas * of_replica


def describe(row: dict) -> str:
  """Returns the line that tells of a step beside the plan."""
  seconds = f'{row["step_seconds"]:.3g} s a step'
  if 'step_seconds_planned' in row:
    seconds += f' (planned {row["step_seconds_planned"]:.3g} s)'
  memory = ''
  if 'memory_bytes' in row:
    memory = (
      f', {row["memory_bytes"] / 1e9:.3g} GB of memory (planned '
      f'{row["memory_bytes_planned"] / 1e9:.3g} GB)'
    )
  return f'step {row["step"]}: {seconds}{memory}'


def _peak_resident() -> int:
  # Unlike getrusage's, it does not begin with that of the process that forked.
  status = pathlib.Path('/proc/self/status').read_text('ascii')
  return int(re.search(r'VmHWM:\s+(\d+)', status).group(1)) * 1024
