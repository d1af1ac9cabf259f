"""The decision: which layer on which stage and device, and how it runs."""

from lingvo_gpipe.plan.plan import Plan, StagePlan, make_plan, trace_network
from lingvo_gpipe.plan.remat import REMAT_MODES, keeps_activations
from lingvo_gpipe.plan.wiring import StageWiring, Wiring

__all__ = [
  'REMAT_MODES',
  'Plan',
  'StagePlan',
  'StageWiring',
  'Wiring',
  'keeps_activations',
  'make_plan',
  'trace_network',
]
