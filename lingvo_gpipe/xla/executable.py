"""Compiles a lowered step for the devices of one of XLA's clients."""

from collections.abc import Sequence

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

from lingvo_gpipe.xla import lowered as lowered_lib
from lingvo_gpipe.xla import regions


def compile_step(lowered: lowered_lib.Lowered, devices: Sequence):
  """Returns the executable of a step.

  Args:
    lowered: the step.
    devices: as many as the mesh has cores; of a client that can run it, or of a
      topology that can only be compiled for.
  """

  def prepare(module):
    _annotate(module, lowered)
    regions.mark(module)

  return _compile(lowered.code, devices, prepare)


def compile_text(code: str, devices: Sequence):
  """Returns the executable of a module of StableHLO without regions."""
  return _compile(code, devices, lambda module: None)


def _compile(code, devices, prepare):
  devices = list(devices)
  ids = np.array([[device.id for device in devices]])
  options = compiler.get_compile_options(1, len(devices), ids)
  options.executable_build_options.use_spmd_partitioning = True
  options.executable_build_options.use_shardy_partitioner = False
  with mlir.make_ir_context():
    module = ir.Module.parse(code)
    prepare(module)
    return compiler.backend_compile_and_load(
      devices[0].client,
      module,
      xla_client.DeviceList(tuple(devices)),
      options,
      [],
    )


def _annotate(module, lowered):
  """Tells where arguments and results are, and that the state is replaced."""
  [main] = [
    f
    for f in module.body.operations
    if f.operation.attributes['sym_name'].value == 'main'
  ]

  def sharding(entry):
    text = lowered.mesh.text(entry.split)
    return {'mhlo.sharding': ir.StringAttr.get(text)}

  index = ir.IntegerType.get_signless(32)
  arguments = []
  for number, entry in enumerate(lowered.state):
    attributes = sharding(entry)
    attributes['tf.aliasing_output'] = ir.IntegerAttr.get(index, number)
    arguments.append(ir.DictAttr.get(attributes))
  arguments += [ir.DictAttr.get(sharding(entry)) for entry in lowered.batch]
  results = [ir.DictAttr.get(sharding(entry)) for entry in lowered.state]
  replicated = {'mhlo.sharding': ir.StringAttr.get('{replicated}')}
  results += [ir.DictAttr.get(replicated)] * len(lowered.metrics)
  main.attributes['arg_attrs'] = ir.ArrayAttr.get(arguments)
  main.attributes['res_attrs'] = ir.ArrayAttr.get(results)
