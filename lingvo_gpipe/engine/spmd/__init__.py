"""One program for all cores: equal stages, stacked; for TPUs."""

from lingvo_gpipe.engine.spmd.layout import Entry
from lingvo_gpipe.engine.spmd.mesh import Mesh
from lingvo_gpipe.engine.spmd.program import Program, build

__all__ = ['Entry', 'Mesh', 'Program', 'build']
