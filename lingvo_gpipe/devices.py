"""Finds a device for each stage."""

import tensorflow as tf

from lingvo_gpipe import errors


def stage_devices(num_stages: int) -> list[str]:
  """Returns the name of a device for each stage: GPUs if there are any.

  Raises:
    UserError: there are fewer devices than stages.
  """
  gpus = tf.config.list_logical_devices('GPU')
  devices = gpus or tf.config.list_logical_devices('CPU')
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
