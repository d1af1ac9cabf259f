"""The chief's side: joins the workers and learns their devices."""

from collections.abc import Mapping

import tensorflow as tf

from lingvo_gpipe.cluster import addresses as addresses_lib
from lingvo_gpipe.cluster import health


def connect(workers: Mapping[int, str], timeout: float) -> list[str]:
  """Makes the workers' devices this process's own; returns their names.

  To be called before TensorFlow has started.

  Args:
    workers: their addresses by task.
    timeout: seconds to wait for them.

  Raises:
    UserError: one does not answer, or is not what it should be.
  """
  statuses = health.wait_for_all(workers, timeout)
  tf.config.experimental_connect_to_cluster(
    tf.train.ClusterSpec({addresses_lib.job_name(): dict(workers)}),
    job_name='chief',
  )
  return [device for status in statuses for device in status.devices]
