"""Finds a device for each stage."""

import tensorflow as tf

from lingvo_gpipe import errors


def stage_devices(num_stages: int, num_replicas: int = 1) -> list[str]:
  """Returns the name of a device for each stage: GPUs if there are any.

  Args:
    num_stages: of one replica, those that share a device counted once.
    num_replicas: copies of the pipeline; the devices of the first come first.

  Raises:
    UserError: there are fewer devices than stages of all replicas.
  """
  needed = num_stages * num_replicas
  gpus = tf.config.list_logical_devices('GPU')
  devices = gpus or tf.config.list_logical_devices('CPU')
  if len(devices) < needed:
    kind = 'GPU' if gpus else 'CPU'
    asked = f'num_stages={num_stages}'
    advice = f'set num_stages to {len(devices) // num_replicas} or less'
    if num_replicas > 1:
      asked += f' x num_replicas={num_replicas} takes {needed} devices'
      advice = f'set num_replicas to {len(devices) // num_stages} or less'
      if num_stages > len(devices):
        advice = f'set num_replicas to 1 and num_stages to {len(devices)}'
    if not gpus:
      advice = (
        f'call lingvo_gpipe.runtime.configure({needed}) first, or {advice}'
      )
    raise errors.UserError(
      f'{asked}, but TensorFlow has {len(devices)} {kind} device(s): {advice}.'
    )
  return [device.name for device in devices[:needed]]
