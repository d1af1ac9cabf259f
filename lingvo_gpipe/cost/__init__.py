"""What each layer costs: parameters, bytes and FLOPs, from shapes alone."""

from lingvo_gpipe.cost.layer_trace import LayerTrace, trace_layer

__all__ = ['LayerTrace', 'trace_layer']
