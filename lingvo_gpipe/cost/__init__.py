"""What each layer costs: parameters, bytes and FLOPs, from shapes alone."""

from lingvo_gpipe.cost.layer_trace import LayerTrace, trace_layer
from lingvo_gpipe.cost.slots import slot_bytes

__all__ = ['LayerTrace', 'slot_bytes', 'trace_layer']
