"""Finds a device for each stage."""

import tensorflow as tf

from lingvo_gpipe import errors

# What TensorFlow calls the process that builds the graphs: with workers, and
# without.
CHIEF = 'chief'
_THIS_PROCESS = (CHIEF, 'localhost')


def stage_devices(num_stages: int, num_replicas: int = 1) -> list[str]:
  """Returns the name of a device for each stage: GPUs if there are any.

  Args:
    num_stages: of one replica, those that share a device counted once.
    num_replicas: copies of the pipeline; the devices of the first come first.

  Raises:
    UserError: there are fewer devices than stages of all replicas.
  """
  needed = num_stages * num_replicas
  gpus = _of_workers(tf.config.list_logical_devices('GPU'))
  devices = gpus or _of_workers(tf.config.list_logical_devices('CPU'))
  if len(devices) < needed:
    kind = 'GPU' if gpus else 'CPU'
    asked = f'num_stages={num_stages}'
    advice = f'set num_stages to {len(devices) // num_replicas} or less'
    if num_replicas > 1:
      asked += f' x num_replicas={num_replicas} takes {needed} devices'
      advice = f'set num_replicas to {len(devices) // num_stages} or less'
      if num_stages > len(devices):
        advice = f'set num_replicas to 1 and num_stages to {len(devices)}'
    if are_remote():
      advice = f'start more workers, or {advice}'
    elif not gpus:
      advice = (
        f'call lingvo_gpipe.runtime.configure({needed}) first, or {advice}'
      )
    raise errors.UserError(
      f'{asked}, but TensorFlow has {len(devices)} {kind} device(s): {advice}.'
    )
  return [device.name for device in devices[:needed]]


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
