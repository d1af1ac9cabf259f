"""The decision: which layer on which stage and device, and how it runs."""

from lingvo_gpipe import runtime

# Before `python -m lingvo_gpipe.plan` can do it.
with runtime.quiet_tensorflow():
  import tensorflow  # noqa: F401

from lingvo_gpipe.plan.costs import Costs, Network
from lingvo_gpipe.plan.decide import DoesNotFit, cut, remats
from lingvo_gpipe.plan.forecast import Forecast, predict
from lingvo_gpipe.plan.machine import LayerSeconds, Machine, parse_memory
from lingvo_gpipe.plan.plan import (
  Plan,
  StagePlan,
  make_plan,
  structure_key,
  trace_network,
)
from lingvo_gpipe.plan.profile import read as read_profile
from lingvo_gpipe.plan.remat import REMAT_MODES
from lingvo_gpipe.plan.remat import check as check_remat
from lingvo_gpipe.plan.wiring import StageWiring, Wiring

__all__ = [
  'REMAT_MODES',
  'Costs',
  'DoesNotFit',
  'Forecast',
  'LayerSeconds',
  'Machine',
  'Network',
  'Plan',
  'StagePlan',
  'StageWiring',
  'Wiring',
  'check_remat',
  'cut',
  'make_plan',
  'parse_memory',
  'predict',
  'read_profile',
  'remats',
  'structure_key',
  'trace_network',
]
