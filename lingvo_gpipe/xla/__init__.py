"""Compiles the spmd engine's program by XLA itself, without TensorFlow.

Needs the extra `tpu`: jaxlib, which has XLA's clients, and libtpu, which has
the compiler for TPUs and needs none to compile for one.
"""

from lingvo_gpipe import runtime

with runtime.quiet_tensorflow():
  import tensorflow  # noqa: F401

from lingvo_gpipe.xla.lowered import Lowered, lower
from lingvo_gpipe.xla.program_text import collectives, in_ticks
from lingvo_gpipe.xla.topology import Report, compile_for, devices, memory

__all__ = [
  'Lowered',
  'Report',
  'collectives',
  'compile_for',
  'devices',
  'in_ticks',
  'lower',
  'memory',
]
