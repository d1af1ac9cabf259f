"""Prepares TensorFlow and Lingvo for pipelines, once per process.

Everything here is process-wide and must come before the first TensorFlow op;
the trainer and the tests call `configure`, library users call it themselves.
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from absl import logging as absl_logging

from lingvo_gpipe import errors


def configure(num_cpu_devices: int = 1) -> None:
  """Sets up eager Lingvo, `num_cpu_devices` virtual CPU devices, exact graphs.

  Raises:
    UserError: TensorFlow has started already with fewer devices.
  """
  prepare(num_cpu_devices)
  from lingvo.core import py_utils

  with quiet_tensorflow():
    py_utils.GetOrCreateGlobalStepVar()


def prepare(num_cpu_devices: int = 1) -> None:
  """Does of `configure` what comes before TensorFlow starts."""
  with quiet_tensorflow():
    import tensorflow as tf
    from absl import flags
    from lingvo.core import py_utils

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['lingvo_gpipe'])
  # Weights are drawn from (seed, variable name): the same for every cut.
  _set_default('stateless_vars_init', True)
  # The Learner skips an update with a NaN; a check inside it would abort.
  _set_default('enable_check_numerics', False)
  py_utils.SetEagerMode(True)
  # Graph rewrites depend on where stages are cut and change the last bits.
  tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
  with quiet_tensorflow():
    _create_virtual_cpus(num_cpu_devices)


def silence_logs() -> None:
  """Leaves of what TensorFlow and Lingvo log the errors alone."""
  absl_logging.set_verbosity(absl_logging.ERROR)
  logging.getLogger('tensorflow').setLevel(logging.ERROR)


def _create_virtual_cpus(count: int) -> None:
  import tensorflow as tf

  cpu = tf.config.list_physical_devices('CPU')[0]
  try:
    tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
  except RuntimeError as error:
    available = len(tf.config.list_logical_devices('CPU'))
    if available < count:
      raise errors.UserError(
        f'TensorFlow has already started with {available} CPU device(s), '
        f'{count} are needed: call lingvo_gpipe.runtime.configure({count}) '
        'before any other TensorFlow code.'
      ) from error


def _set_default(flag: str, value: bool) -> None:
  """Changes a Lingvo flag's default; a value given by the user stays."""
  from absl import flags

  flags.FLAGS.set_default(flag, value)


@contextlib.contextmanager
def quiet_tensorflow() -> Iterator[None]:
  """Around TensorFlow's import: hides what its libraries write to stderr.

  They report missing GPUs there before any log level is in force. If the body
  raises, everything that was hidden is printed after all.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # oneDNN's kernels run small matrix products a fifth faster than Eigen's;
  # TensorFlow itself turns them on for some processors only.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
  sys.stderr.flush()
  real_stderr = os.dup(2)
  with tempfile.TemporaryFile() as hidden:
    os.dup2(hidden.fileno(), 2)
    try:
      yield
    except BaseException:
      os.dup2(real_stderr, 2)
      hidden.seek(0)
      sys.stderr.write(hidden.read().decode(errors='replace'))
      raise
    finally:
      os.dup2(real_stderr, 2)
      os.close(real_stderr)
