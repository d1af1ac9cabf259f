"""Stages that differ, as one program: a switch on the number of the core.

    core 0   [ w of stage 0 . . ]      every core has one row of weights, as
    core 1   [ w of stage 1     ]      long as the longest, and branches for all
    core 2   [ w of stage 2 .   ]      stages, of which it runs its own

What goes from stage to stage is packed the same way: for each example one row,
as long as the longest.
"""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.engine.spmd import chain, core

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Packing:
  """Tensors [examples, ...] in one [examples, width], padded with zeros.

  Attributes:
    specs: of the tensors.
    dtype: of the whole: that of the widest floats. Integers travel as bits.
    width: at least what the tensors take.
  """

  specs: tuple[tf.TensorSpec, ...]
  dtype: tf.DType
  width: int

  def pack(self, tensors: Tensors) -> tf.Tensor:
    rows = [tf.reshape(self._to_float(t), [t.shape[0], -1]) for t in tensors]
    whole = tf.concat(rows, 1)
    return tf.pad(whole, [[0, 0], [0, self.width - whole.shape[1]]])

  def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
    tensors, start = [], 0
    for spec in self.specs:
      stop = start + size_of_example(spec)
      rows = whole[:, start:stop]
      if spec.dtype.is_floating:
        rows = tf.cast(rows, spec.dtype)
      else:
        rows = tf.bitcast(rows, spec.dtype)
      shape = [whole.shape[0], *spec.shape[1:]]
      tensors.append(tf.reshape(rows, shape))
      start = stop
    return tensors

  def pack_gradients(self, gradients: Tensors, num_examples: int) -> tf.Tensor:
    """Packs gradients of those that are floats; of others, zeros."""
    gradients = iter(gradients)
    return self.pack(
      [
        next(gradients)
        if spec.dtype.is_floating
        else tf.zeros([num_examples, *spec.shape[1:]], self.dtype)
        for spec in self.specs
      ]
    )

  def unpack_gradients(self, whole: tf.Tensor) -> list[tf.Tensor]:
    pairs = zip(self.specs, self.unpack(whole), strict=True)
    return [tensor for spec, tensor in pairs if spec.dtype.is_floating]

  def _to_float(self, tensor):
    if tensor.dtype.is_floating:
      return tf.cast(tensor, self.dtype)
    return tf.bitcast(tensor, self.dtype)


def size_of_example(spec: tf.TensorSpec) -> int:
  return math.prod(spec.shape[1:])


def make_packings(
  boundaries: Sequence[Sequence[tf.TensorSpec]],
) -> list[Packing]:
  """Returns how to pack what crosses each boundary, all of one width.

  Raises:
    UserError: there is no room for integers.
  """
  dtypes = {s.dtype for specs in boundaries for s in specs}
  if tf.int32 in dtypes:
    dtypes.add(tf.float32)  # Which has room for them.
  floats = [dtype for dtype in dtypes if dtype.is_floating]
  dtype = max(floats, key=lambda dtype: dtype.size, default=tf.float32)
  for other in dtypes:
    if not other.is_floating and other.size != dtype.size:
      raise errors.UserError(
        f'Tensors of type {other.name} go from stage to stage. Where stages '
        f'differ the spmd engine packs them with the floats, of {dtype.name}, '
        'so integers must be as large. Use int32 and float32, or engine=mpmd.'
      )
  width = max(sum(map(size_of_example, specs)) for specs in boundaries)
  return [Packing(tuple(specs), dtype, width) for specs in boundaries]


class Stages:
  """All stages, their weights packed."""

  def __init__(
    self,
    chains: Sequence[chain.Chain],
    seeds: Sequence[Sequence[int]],
    packings: Sequence[Packing],
  ):
    """Sets up.

    Args:
      chains: the layers of each stage.
      seeds: of the layers of each stage.
      packings: of what goes into each stage, and comes out of the last.
    """
    self._chains = chains
    self._seeds = seeds
    self._packings = packings
    self.sizes = [
      sum(math.prod(s.shape) for s in c.weight_specs) for c in chains
    ]
    dtypes = {s.dtype for c in chains for s in c.weight_specs}
    if len(dtypes) > 1:
      names = ', '.join(sorted(dtype.name for dtype in dtypes))
      raise errors.UserError(
        f'Weights have types {names}. Where stages differ the spmd engine '
        'packs them into one row: use one dtype, or engine=mpmd.'
      )
    [self._dtype] = dtypes

  @property
  def weight_spec(self) -> tf.TensorSpec:
    """Spec of a core's row of weights."""
    return tf.TensorSpec([max(self.sizes)], self._dtype)

  @property
  def padding(self) -> int:
    """How many weights are there for the sake of length alone, on all cores."""
    return sum(max(self.sizes) - size for size in self.sizes)

  def carried(self, num_examples: int) -> tf.TensorSpec:
    """Spec of what goes from stage to stage."""
    packing = self._packings[0]
    return tf.TensorSpec([num_examples, packing.width], packing.dtype)

  def layer(self) -> core.StageLayer:
    return core.StageLayer(self._forward, self._vjp)

  def _forward(self, core, theta, values, rng):
    def branch(k):
      args = self._packings[k].unpack(values[0])
      results = self._run(k, self._unpack_weights(k, theta[0]), args, rng)
      return self._packings[k + 1].pack(results)

    return [self._switch(core, branch)]

  def _vjp(self, core, theta, values, rng, cotangents):
    def branch(k):
      dtheta, dargs = chain.vjp(
        lambda theta, args: self._run(k, theta, args, rng),
        self._unpack_weights(k, theta[0]),
        self._packings[k].unpack(values[0]),
        self._packings[k + 1].unpack_gradients(cotangents[0]),
      )
      row = tf.concat([tf.reshape(g, [-1]) for g in dtheta], 0)
      row = tf.pad(row, [[0, theta[0].shape[0] - row.shape[0]]])
      num_examples = values[0].shape[0]
      return self._packings[k].pack_gradients(dargs, num_examples), row

    dvalue, dweights = self._switch(core, branch)
    return [dvalue], [dweights]

  def _switch(self, core, branch):
    branches = [lambda k=k: branch(k) for k in range(len(self._chains))]
    return tf.switch_case(core, branches)

  def _run(self, k, theta, args, rng):
    seeds = tf.constant(self._seeds[k], tf.int64)
    return self._chains[k].forward(theta, args, rng._replace(seeds=seeds))

  def _unpack_weights(self, k, row):
    theta, start = [], 0
    for spec in self._chains[k].weight_specs:
      stop = start + math.prod(spec.shape)
      theta.append(tf.reshape(row[start:stop], spec.shape))
      start = stop
    return theta


class PackedInputs:
  """In the place of layers before the stages: packs what the first takes."""

  def __init__(self, packing: Packing):
    self._packing = packing

  def forward(self, theta, args, rng):
    del theta, rng
    return [self._packing.pack(args)]


class UnpackedResults:
  """Layers after the stages, which take what the last one packed."""

  def __init__(self, layers: chain.Chain, packing: Packing):
    self._layers = layers
    self._packing = packing

  def run(self, theta, args, rng, targets=()):
    args = self._packing.unpack(args[0])
    return self._layers.run(theta, args, rng, targets)
