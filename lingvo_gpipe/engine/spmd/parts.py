"""What a step is made of: stages of equal layers, or stages that differ."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gpipe import errors, partition, randomness, tied_weights
from lingvo_gpipe.cost import memory
from lingvo_gpipe.engine.spmd import (
  chain,
  core,
  equal_layers,
  fields,
  gradients,
  layout,
  unequal_layers,
)

# Where the names of all stages' weights begin.
_STAGES = 'stages'


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a step is made of; see step.TrainStep and Program."""

  shape: core.Shape
  before: gradients.Outside
  after: gradients.Outside
  stage_layer: core.StageLayer
  carried: list[tf.TensorSpec]
  stage_weights: list[layout.Entry]
  outside_weights: list[layout.Entry]
  stage_seeds: np.ndarray
  rows: dict[str, tuple]
  padding: int = 0


class Maker:
  """Makes the parts of a step."""

  def __init__(self, p, layers, network, inputs, size):
    self._p = p
    self._layers = layers
    self._network = network
    self._inputs = inputs
    self._size = size
    self._mesh = fields.mesh(p)

  def equal(self, run: range) -> Parts:
    """Stages of equal layers, with all other layers outside."""
    p, network = self._p, self._network
    fields.check_tied(p, network.names[run.start : run.stop])
    per_stage = len(run) // fields.num_stages(p)
    carried = equal_layers.args_of(network, run.start)
    segment = fields.layers_per_segment(
      p,
      per_stage,
      self._static_bytes(run.start),
      self._bytes_per_input(carried),
    )
    shape = self._shape(fields.virtual_stages(p), per_stage, segment)
    grid = stage_grid(shape, run)
    stage = self._chain(run[:1], carried)
    before, after = range(run.start), range(run.stop, len(self._layers))
    entries, places = self._outside_weights([*before, *after])
    middle = self._count(before)
    names = network.names
    return Parts(
      shape=shape,
      before=gradients.Outside(
        self._chain(before, self._inputs), places[:middle], self._seeds(before)
      ),
      after=gradients.Outside(
        self._chain(after, carried), places[middle:], self._seeds(after)
      ),
      stage_layer=equal_layers.stage_layer(stage),
      carried=chain.present(carried),
      stage_weights=[
        layout.stacked(
          f'{_STAGES}/{name}',
          spec,
          shape.mesh.num_stages,
          shape.layers_per_core,
        )
        for name, spec in zip(stage.weights[0], stage.weight_specs, strict=True)
      ],
      outside_weights=entries,
      stage_seeds=np.array([self._seeds(row) for row in grid]),
      rows={
        f'{_STAGES}/{weight}': tuple(
          tuple(((f'{names[l]}/{weight}', tuple(spec.shape)),) for l in row)
          for row in grid
        )
        for weight, spec in zip(
          stage.weights[0], stage.weight_specs, strict=True
        )
      },
    )

  def unequal(self) -> Parts:
    """Stages that differ; only the loss is outside."""
    p, network = self._p, self._network
    K, last = self._mesh.num_stages, len(self._layers) - 1
    fields.check_unequal(p, last)
    fields.check_tied(p, network.names[:last])
    costs = [trace.fprop_flops for trace in network.traces[:last]]
    cuts = partition.cut(costs, K)
    args = [equal_layers.args_of(network, cut.start) for cut in cuts]
    num_targets = len(equal_layers.args_of(network, last)) - len(
      network.traces[last - 1].outputs
    )
    args.append(equal_layers.args_of(network, last)[: -num_targets or None])
    stages = unequal_layers.Stages(
      [
        self._chain(cut, of_stage)
        for cut, of_stage in zip(cuts, args, strict=False)
      ],
      [self._seeds(cut) for cut in cuts],
      packings := unequal_layers.make_packings(
        [chain.present(of_stage) for of_stage in args]
      ),
    )
    loss = [last]
    entries, places = self._outside_weights(loss)
    return Parts(
      shape=self._shape(1, 1, 1),
      before=gradients.Outside(
        unequal_layers.PackedInputs(packings[0]), [], []
      ),
      after=gradients.Outside(
        unequal_layers.UnpackedResults(
          self._chain(loss, args[-1]), packings[-1]
        ),
        places,
        self._seeds(loss),
      ),
      stage_layer=stages.layer(),
      carried=[stages.carried(self._size)],
      stage_weights=[
        layout.stacked(f'{_STAGES}/row', stages.weight_spec, K, 1)
      ],
      outside_weights=entries,
      stage_seeds=np.zeros([K, 1], np.int64),
      rows={
        f'{_STAGES}/row': tuple(
          (
            tuple(
              (f'{network.names[l]}/{w.name}', tuple(w.shape))
              for l in cut
              for w in network.traces[l].weights
            ),
          )
          for cut in cuts
        )
      },
      padding=stages.padding * stages.weight_spec.dtype.size,
    )

  def _shape(self, num_circuits, layers_per_stage, layers_per_segment):
    return core.Shape(
      mesh=self._mesh,
      num_circuits=num_circuits,
      layers_per_stage=layers_per_stage,
      layers_per_segment=layers_per_segment,
      num_micro_batches=fields.num_micro_batches(
        self._p, self._size, self._inputs
      ),
      micro_batch_size=self._size,
    )

  def _static_bytes(self, layer):
    """Returns what a core holds beside kept inputs: state, and one layer."""
    traces = self._network.traces
    state = sum(trace.param_bytes + trace.trained_bytes for trace in traces)
    state += sum(self._network.slot_bytes)
    backward = traces[layer].backward
    return (
      state // self._mesh.num_stages
      + (backward.internal_bytes + backward.workspace)
      // self._mesh.num_replicas
    )

  def _bytes_per_input(self, carried):
    sizes = [memory.size(spec) for spec in chain.present(carried)]
    count = fields.num_micro_batches(self._p, self._size, self._inputs)
    items = fields.virtual_stages(self._p) * count
    return items * sum(sizes) // self._mesh.num_replicas

  def _chain(self, layers, args):
    return chain.Chain(
      [self._layers[l] for l in layers],
      [self._network.traces[l] for l in layers],
      args,
      self._p.random_bits,
    )

  def _seeds(self, layers):
    names = [self._network.names[l] for l in layers]
    return [randomness.layer_seed(self._p.random_seed, n) for n in names]

  def _count(self, layers):
    return sum(len(self._network.traces[l].weights) for l in layers)

  def _outside_weights(self, layers):
    """Returns entries of the weights of layers, and for each weight its own.

    Tied weights share one.
    """
    entries, places, place_of = [], [], {}
    for l in layers:
      for weight in self._network.traces[l].weights:
        path = f'{self._network.names[l]}/{weight.name}'
        spec = tf.TensorSpec(weight.shape, weight.dtype)
        owner = tied_weights.owner_of(path, self._p.tied_weights)
        if owner == path:
          place_of[path] = len(entries)
          entries.append(layout.spread(path, spec, self._mesh.num_stages))
        elif owner not in place_of or entries[place_of[owner]].spec != spec:
          raise errors.UserError(
            f'tied_weights: there is no weight {owner} of shape '
            f'{spec.shape.as_list()} for {path} to be; --mode=inspect_model '
            'prints all names.'
          )
        places.append(place_of[owner])
    return entries, places


def stage_grid(shape: core.Shape, run: range) -> np.ndarray:
  """Returns the layers [stages, layers a core] of each core of the ring.

  With V circuits, core k has stages k, K + k, 2 K + k and so on.
  """
  V, n = shape.num_circuits, shape.layers_per_stage
  grid = np.array(run).reshape(V, shape.mesh.num_stages, n)
  return grid.transpose(1, 0, 2).reshape(shape.mesh.num_stages, V * n)
