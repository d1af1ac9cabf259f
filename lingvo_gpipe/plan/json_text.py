"""Writes a plan as JSON, for other programs."""

import json

from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import search


def to_json(found: search.Found, machine: machine_lib.Machine) -> str:
  """Returns the choice, the figures of the pipeline and those of each stage.

  Times are in seconds, sizes in bytes; what a stage recomputes is in layers
  counted from its first.
  """
  plan, forecast = found.plan, found.forecast
  stages = []
  for planned, expected in zip(plan.stages, forecast.stages, strict=True):
    stages.append(
      {
        'layers': [plan.names[l] for l in planned.layers],
        'device': expected.device,
        'parameters': expected.num_params,
        'forward_flops': expected.forward_flops,
        'seconds': expected.seconds,
        'recompute_seconds': expected.recompute_seconds,
        'micro_batches_held': expected.in_flight,
        'bytes': expected.bytes,
        'checkpoints': list(planned.remat.checkpoints),
        'recorded': list(planned.remat.recorded),
        'backward': [
          {'step': type(step).__name__.lower(), **step._asdict()}
          for step in planned.remat.backward
        ],
      }
    )
  content = {
    'num_stages': plan.num_stages,
    'num_micro_batches': plan.num_micro_batches,
    'micro_batch_sizes': list(plan.micro_batch_sizes),
    'schedule': found.choice.schedule,
    'remat': plan.remat,
    'parameters': sum(t.num_params for t in plan.traces),
    'step_seconds': forecast.step_seconds,
    'times_are': 'measured' if machine.measured else 'from FLOPs',
    'bubble': forecast.bubble,
    'bubble_by_cause': forecast.causes,
    'recompute_share': forecast.recompute_share,
    'slowest_stage_over_mean': forecast.imbalance,
    'device_bytes': list(forecast.device_bytes),
    'device_memory': machine.memory and list(machine.memory),
    'stages': stages,
  }
  return json.dumps(content, indent=1) + '\n'
