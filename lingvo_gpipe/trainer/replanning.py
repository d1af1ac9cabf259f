"""Makes a pipeline fit the workers that are left."""

from collections.abc import Callable

from lingvo_gpipe import errors, pipelining_params


def check(pipeline) -> None:
  """Checks that a pipeline may be cut anew.

  Raises:
    UserError: its Params are for a fixed number of devices.
  """
  for field in ('device_speeds', 'device_memory'):
    value = pipeline.Get(field)
    if isinstance(value, str) and ',' in value:
      raise errors.UserError(
        f'{field}={value} lists devices, and with --on_worker_loss=replan '
        'their number changes: give one value for all, or leave out replan.'
      )
  for field in ('schedule_file', 'cell_tpl', 'devices'):
    if pipeline.Get(field):
      raise errors.UserError(
        f'{field} is for a fixed number of devices, which changes with '
        f'--on_worker_loss=replan: leave out {field}, or replan.'
      )


def fit(pipeline, num_devices: int, say: Callable[[str], None]) -> None:
  """Takes fewer replicas and stages where there are too few devices.

  Args:
    pipeline: Params of the PipeliningLayer.
    num_devices: how many there are for all replicas.
    say: told what changes.
  """
  R, K = pipeline.num_replicas, pipeline.num_stages
  pipeline.num_replicas = min(R, num_devices)
  if pipeline.num_replicas < R:
    say(f'num_replicas: {pipeline.num_replicas} in place of {R}')
    if pipeline.num_replicas == 1:
      pipeline.shard_optimizer = False
  if K == pipelining_params.AUTO:
    return
  each = num_devices // pipeline.num_replicas
  taken = _devices_taken(pipeline)
  if taken > each:
    pipeline.num_stages = each * -(-K // taken)
    say(f'num_stages: {pipeline.num_stages} in place of {K}')


def _devices_taken(pipeline):
  if pipelining_params.AUTO in (pipeline.schedule, pipeline.num_micro_batches):
    return pipeline.num_stages
  return pipelining_params.num_devices(pipeline)
