"""What must be in the environment before jax is imported."""

import os

_VARIABLES = {
  # jax itself stays on the CPU: a TPU that is compiled for need not be there.
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}


def prepare(num_host_cores: int = 1) -> None:
  """Sets what the user has not.

  Args:
    num_host_cores: virtual cores that XLA is to make of this machine.
  """
  for name, value in _VARIABLES.items():
    os.environ.setdefault(name, value)
  os.environ.setdefault(
    'XLA_FLAGS', f'--xla_force_host_platform_device_count={num_host_cores}'
  )
