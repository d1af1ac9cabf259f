"""Who does what when. Plain data; this room imports no TensorFlow."""

from lingvo_gpipe.schedule.action import Action, Schedule
from lingvo_gpipe.schedule.gpipe import forward_only, gpipe
from lingvo_gpipe.schedule.order import global_order

__all__ = ['Action', 'Schedule', 'forward_only', 'global_order', 'gpipe']
