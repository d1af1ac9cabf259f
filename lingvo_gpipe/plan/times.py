"""How long actions take by the plan: from FLOPs, so in no unit of time.

The shares that a simulation of them gives (bubble, busy, recompute) do not
depend on how fast the devices are, as long as they are equal.
"""

from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import plan as plan_lib


def planned_times(plan: plan_lib.Plan) -> schedule_lib.Times:
  """Returns times in forward FLOPs; recomputing adds to B and I."""
  seconds = []
  for k, stage in enumerate(plan.stages):
    forward = sum(plan.traces[l].fprop_flops for l in stage.layers)
    half = forward  # Each half of a backward does about the same work.
    again = forward * recomputed_share(plan, k)
    # Without inputs to send gradients back to, there is the W half alone.
    sends_back = any(
      plan.wiring.values[v].has_gradient for v in stage.wiring.takes
    )
    seconds.append(
      {
        'F': forward,
        'B': 2 * half + again,
        'I': half + again if sends_back else 0.0,
        'W': half if sends_back else 2 * half + again,
      }
    )
  return schedule_lib.Times(tuple(seconds), (0.0,) * (plan.num_stages - 1))


def recomputed_share(plan: plan_lib.Plan, k: int) -> float:
  """Returns the share of micro-batches that stage k computes again."""
  again = [
    not plan.keeps_activations(k, i) for i in range(plan.num_micro_batches)
  ]
  return sum(again) / len(again)


def planned_recompute_share(plan: plan_lib.Plan) -> float:
  """Returns what part of all work is to compute activations again."""
  times = planned_times(plan)
  whole = again = 0.0
  for k, stage in enumerate(plan.stages):
    forward = sum(plan.traces[l].fprop_flops for l in stage.layers)
    whole += times.seconds[k]['F'] + times.seconds[k]['B']
    again += forward * recomputed_share(plan, k)
  return again / whole if whole else 0.0
