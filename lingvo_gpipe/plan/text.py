"""Writes a plan for people to read."""

from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import plan as plan_lib
from lingvo_gpipe.plan import times as times_lib
from lingvo_gpipe.schedule import memory


def to_text(plan: plan_lib.Plan) -> str:
  """Returns a table of layers by stage; FLOPs are of one micro-batch."""
  sizes = plan.micro_batch_sizes
  lines = [
    f'{plan.num_stages} stages on {len(plan.schedule)} devices, '
    f'{plan.num_micro_batches} micro-batches of '
    f'{_range(min(sizes), max(sizes))} examples, remat {plan.remat}',
    f'bubble by FLOPs: {_bubble(plan)}',
    'micro-batches in flight: '
    + ', '.join(
      f'device {d} {peak}' for d, peak in enumerate(memory.peaks(plan.schedule))
    ),
    '',
    f'{"layer":<24} {"kind":<24} {"parameters":>12} {"bytes":>10} '
    f'{"forward FLOPs":>14}',
  ]
  for k, stage in enumerate(plan.stages):
    traces = [plan.traces[l] for l in stage.layers]
    sent = sum(_bytes(plan, v) for v in stage.wiring.gives)
    lines += [
      '',
      f'stage {k} on {stage.device}: '
      f'{sum(t.num_params for t in traces):,} parameters, '
      f'{si(sum(t.param_bytes for t in traces))}B, '
      f'{si(sum(t.fprop_flops for t in traces))}FLOPs, '
      f'hands on {si(sent)}B',
    ]
    for l in stage.layers:
      t = plan.traces[l]
      lines.append(
        f'  {plan.names[l]:<22} {t.kind:<24} {t.num_params:>12,} '
        f'{si(t.param_bytes) + "B":>10} {si(t.fprop_flops):>14}'
      )
  total = sum(t.num_params for t in plan.traces)
  return '\n'.join([*lines, '', f'{total:,} parameters in all', ''])


def si(value: float) -> str:
  """Returns e.g. `1.5 M`; units are decimal."""
  units = ['', 'k', 'M', 'G', 'T', 'P']
  while value >= 1000 and len(units) > 1:
    value /= 1000
    units.pop(0)
  return f'{value:.3g} {units[0]}'


def _range(low: int, high: int) -> str:
  return str(low) if low == high else f'{low} to {high}'


def _bubble(plan: plan_lib.Plan) -> str:
  times = times_lib.planned_times(plan)
  timeline = schedule_lib.simulate(plan.schedule, times)
  if not schedule_lib.makespan(timeline):
    return 'unknown'
  causes = schedule_lib.bubble_by_cause(plan.schedule, times)
  parts = ', '.join(f'{name} {share:.1%}' for name, share in causes.items())
  return f'{schedule_lib.bubble(timeline):.1%} ({parts})'


def _bytes(plan: plan_lib.Plan, v: int) -> int:
  spec = plan.wiring.values[v].spec
  return (spec.shape.num_elements() or 0) * spec.dtype.size
