"""Finds the run of equal layers that becomes the stages.

embedding  block block block block  norm  softmax
'-------'  '---------------------'  '-----------'
 before       the run, stacked          after
"""

import tensorflow as tf

from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.engine.spmd import chain, core


def find_run(network: plan_lib.Network) -> range:
  """Returns the longest run of layers that are equal and can be stacked.

  The layers have one structure, and return what they take: the same shapes and
  types, so that any of them can come after any.
  """
  best = range(0)
  start = 0
  for l in range(len(network.names) + 1):
    goes_on = (
      l < len(network.names)
      and network.keys[l] == network.keys[start]
      and _returns_what_it_takes(network, l)
    )
    if not goes_on:
      if l - start > len(best) and _returns_what_it_takes(network, start):
        best = range(start, l)
      start = l
  return best


def args_of(network: plan_lib.Network, l: int) -> tuple:
  """Returns the specs of the arguments of layer l."""
  values = network.wiring.values
  return tf.nest.map_structure(
    lambda v: None if v is None else values[v].spec,
    network.wiring.layers[l].args,
  )


def _returns_what_it_takes(network, l):
  taken, returned = args_of(network, l), network.traces[l].outputs
  return str(taken) == str(tuple(returned))


def stage_layer(layer: chain.Chain) -> core.StageLayer:
  """Returns the layer of stages that are made of equal ones."""

  def forward(core, theta, values, rng):
    del core
    return layer.forward(theta, values, rng)

  def vjp(core, theta, values, rng, cotangents):
    del core
    dtheta, dvalues = chain.vjp(
      lambda theta, values: layer.forward(theta, values, rng),
      theta,
      values,
      cotangents,
    )
    return dvalues, dtheta

  return core.StageLayer(forward, vjp)
