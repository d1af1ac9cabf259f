"""Writes a plan for people to read."""

from lingvo_gpipe.plan import forecast as forecast_lib
from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import plan as plan_lib

_KINDS = {
  'weights': 'weights',
  'slots': 'slots',
  'gradients': 'grads',
  'batch': 'batch',
  'activations': 'activ.',
  'workspace': 'work',
}


def to_text(
  plan: plan_lib.Plan,
  forecast: forecast_lib.Forecast,
  machine: machine_lib.Machine,
  num_replicas: int = 1,
) -> str:
  """Returns the figures of the pipeline, a table of stages, and the layers."""
  head = summary(plan, forecast, machine, num_replicas)
  return '\n'.join([head, '', *_layers(plan), ''])


def summary(
  plan: plan_lib.Plan,
  forecast: forecast_lib.Forecast,
  machine: machine_lib.Machine,
  num_replicas: int = 1,
) -> str:
  """Returns the figures of the pipeline and the table of stages alone."""
  return '\n'.join(
    [
      *_replicas(plan, num_replicas),
      *_summary(plan, forecast, machine),
      '',
      *_stage_table(forecast, machine),
    ]
  )


def _replicas(plan, num_replicas):
  if num_replicas == 1:
    return []
  return [
    f'{num_replicas} replicas on {num_replicas * len(plan.schedule)} devices; '
    'what follows is one of them, with the largest share of the mini-batch'
  ]


def _summary(plan, forecast, machine):
  sizes = plan.micro_batch_sizes
  num_params = sum(t.num_params for t in plan.traces)
  source = 'as measured' if machine.measured else _assumed(machine)
  lines = [
    f'{plan.num_stages} stages on {len(plan.schedule)} devices, '
    f'{plan.num_micro_batches} micro-batches of '
    f'{_range(min(sizes), max(sizes))} examples, remat {plan.remat}',
    f'{num_params:,} parameters in all',
    f'step {seconds(forecast.step_seconds)} ({source}), '
    f'{sum(sizes) / forecast.step_seconds:,.4g} examples/s'
    if forecast.step_seconds
    else 'step unknown: no layer has FLOPs',
    f'bubble {forecast.bubble:.1%} '
    f'({", ".join(f"{c} {s:.1%}" for c, s in forecast.causes.items())}), '
    f'recomputation {forecast.recompute_share:.1%} of all work',
    f'slowest stage {forecast.imbalance:.3f} of the mean, the least that '
    'contiguous stages allow',
    f'memory at most {si(max(forecast.device_bytes))}B a device',
  ]
  if machine.memory:
    free = [
      machine.memory_of(d) - used
      for d, used in enumerate(forecast.device_bytes)
    ]
    lines[-1] += f', at least {si(min(free))}B left free'
  return lines


def _assumed(machine):
  return f'at {si(machine.flops)}FLOP/s a device'


def _stage_table(forecast, machine):
  """A line a stage; activations and workspace at their peak."""
  header = (
    f'{"stage":>5} {"device":>6} {"layers":>11} {"parameters":>14} '
    f'{"FLOPs":>8} {"forward":>9} {"backward":>9} {"again":>9} {"held":>4} '
    + ' '.join(f'{name:>8}' for name in _KINDS.values())
    + f' {"sum":>8}'
  )
  lines = [header]
  for k, stage in enumerate(forecast.stages):
    layers = f'{stage.layers.start}-{stage.layers.stop - 1}'
    backward = stage.seconds['B'] - stage.recompute_seconds
    lines.append(
      f'{k:>5} {stage.device:>6} {layers:>11} {stage.num_params:>14,} '
      f'{si(stage.forward_flops):>8} {seconds(stage.seconds["F"]):>9} '
      f'{seconds(backward):>9} {seconds(stage.recompute_seconds):>9} '
      f'{stage.in_flight:>4} '
      + ' '.join(f'{si(stage.bytes[kind]):>8}' for kind in _KINDS)
      + f' {si(sum(stage.bytes.values())):>8}'
    )
  lines.append(
    'FLOPs and times of one micro-batch; bytes at the peak, activations of as '
    'many micro-batches as are "held"'
  )
  if machine.memory:
    free = ', '.join(
      f'{si(machine.memory_of(d) - used)}B'
      for d, used in enumerate(forecast.device_bytes)
    )
    lines.append(f'left free on each device: {free}')
  return lines


def _layers(plan):
  """The layers under the stage that holds them."""
  lines = [
    f'{"layer":<24} {"kind":<24} {"parameters":>12} {"bytes":>10} '
    f'{"forward FLOPs":>14}'
  ]
  for k, stage in enumerate(plan.stages):
    lines += ['', f'stage {k} on {stage.device}']
    for l in stage.layers:
      t = plan.traces[l]
      lines.append(
        f'  {plan.names[l]:<22} {t.kind:<24} {t.num_params:>12,} '
        f'{si(t.param_bytes) + "B":>10} {si(t.fprop_flops):>14}'
      )
  return lines


def si(value: float) -> str:
  """Returns e.g. `1.5 M`; units are decimal."""
  if value < 0:
    return f'-{si(-value)}'
  units = ['', 'k', 'M', 'G', 'T', 'P']
  while value >= 1000 and len(units) > 1:
    value /= 1000
    units.pop(0)
  return f'{value:.3g} {units[0]}'


def seconds(value: float) -> str:
  """Returns e.g. `1.5 ms`."""
  if value >= 1 or value == 0:
    return f'{value:.3g} s'
  if value >= 1e-3:
    return f'{value * 1e3:.3g} ms'
  return f'{value * 1e6:.3g} us'


def _range(low: int, high: int) -> str:
  return str(low) if low == high else f'{low} to {high}'
