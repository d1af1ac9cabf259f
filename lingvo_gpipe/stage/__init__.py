"""A stage as pure functions: forward, and backward with recomputation."""

from lingvo_gpipe.stage.functions import StageFunctions
from lingvo_gpipe.stage.stage import Stage, build_stages

__all__ = ['Stage', 'StageFunctions', 'build_stages']
