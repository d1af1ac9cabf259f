"""Turns what the user wrote into a flat list of uniquely named layers."""

import collections
from collections.abc import Sequence

from lingvo.core import base_layer, builder_layers, gpipe

LayerParams = base_layer.BaseLayerParamsT


def flatten(layers: Sequence[LayerParams]) -> list[LayerParams]:
  """Opens nested sequences, each as often as it repeats.

  Opens Lingvo's `SequentialLayer` and `gpipe.FeatureExtractionLayer`, unless
  the latter fetches activations from inside. Returns copies.
  """
  flat = []
  for p in layers:
    if _is_sequence(p):
      for _ in range(getattr(p, 'repeat', 1)):
        flat += flatten([_inherited(sub, p) for sub in p.sub])
    else:
      flat.append(p.Copy())
  return flat


def give_unique_names(layers: Sequence[LayerParams]) -> None:
  """Numbers layers that share a name, in the order of the list.

  Names, and so variables and checkpoints, do not depend on how the list is cut.
  """
  for p in layers:
    p.name = p.name or p.cls.__name__
  shared = collections.Counter(p.name for p in layers)
  seen = collections.Counter()
  for p in layers:
    name = p.name
    if shared[name] > 1:
      p.name = f'{name}_{seen[name]:03d}'
      seen[name] += 1


def _is_sequence(p: LayerParams) -> bool:
  if issubclass(p.cls, gpipe.FeatureExtractionLayer):
    return not p.num_act_inputs and not p.num_act_outputs
  return p.cls is builder_layers.SequentialLayer


def _inherited(sub: LayerParams, parent: LayerParams) -> LayerParams:
  """Returns a copy of `sub` with what it would inherit from its sequence."""
  prefix = getattr(parent, 'variable_name_prefix', '')
  sub = base_layer.BaseLayer.CopyBaseParams(parent, sub.Copy())
  return sub.Set(name=prefix + sub.name)
