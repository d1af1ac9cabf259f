"""One process-wide set-up for all tests: eight virtual devices and cores."""

import logging

import pytest

from lingvo_gpipe import runtime
from lingvo_gpipe.xla import environment

environment.prepare(num_host_cores=8)
runtime.configure(num_cpu_devices=8)
logging.getLogger('tensorflow').setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def fresh_variable_store():
  """Lingvo keeps its store of variables when a layer's __init__ raises.

  Layers built after that would share the variables of those built before.
  """
  import tensorflow as tf

  tf.compat.v1.get_default_graph().lingvo_variable_store = None
