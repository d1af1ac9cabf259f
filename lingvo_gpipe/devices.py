"""Finds a device for each stage."""

import tensorflow as tf

from lingvo_gpipe import errors

# What TensorFlow calls the process that builds the graphs.
_THIS_PROCESS = ('localhost', 'chief')


def stage_devices(num_stages: int) -> list[str]:
  """Returns the name of a device for each stage: GPUs if there are any.

  Raises:
    UserError: there are fewer devices than stages.
  """
  gpus = _of_workers(tf.config.list_logical_devices('GPU'))
  devices = gpus or _of_workers(tf.config.list_logical_devices('CPU'))
  if len(devices) < num_stages:
    kind = 'GPU' if gpus else 'CPU'
    advice = (
      f'set num_stages to {len(devices)} or less'
      if gpus
      else f'call lingvo_gpipe.runtime.configure({num_stages}) first, or set '
      f'num_stages to {len(devices)} or less'
    )
    raise errors.UserError(
      f'num_stages={num_stages}, but TensorFlow has {len(devices)} {kind} '
      f'device(s): {advice}.'
    )
  return [device.name for device in devices[:num_stages]]


def are_remote() -> bool:
  """Returns whether there are workers, whose devices have the stages."""
  return any(map(_is_remote, tf.config.list_logical_devices()))


def _of_workers(devices):
  """Leaves out the devices of this process if there are workers."""
  if are_remote():
    return [device for device in devices if _is_remote(device)]
  return devices


def _is_remote(device):
  job = device.name.removeprefix('/job:').partition('/')[0]
  return device.name.startswith('/job:') and job not in _THIS_PROCESS
