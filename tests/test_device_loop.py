"""Steps in a row inside one function, with the state in slices."""

import numpy as np
import pytest
import small_models
import spmd_runs
import tensorflow as tf
from tensorflow.python.tpu import tpu

from lingvo_gpipe.engine.spmd import device_loop, layout, mesh, slices
from lingvo_gpipe.engine.spmd import state as state_lib


def test_a_loop_makes_the_steps_of_the_other_engine():
  start, losses, _, end = spmd_runs.mpmd_run(small_models.Micro, 10)
  p, program = spmd_runs.build(
    small_models.Micro, num_stages=1, schedule='gpipe'
  )
  loop = device_loop.DeviceLoop(
    program,
    state_lib.pack(program, start),
    tf.distribute.OneDeviceStrategy('/cpu:0'),
    ['/cpu:0'],
  )
  data = iter(p.input.Instantiate().datasource.GetDataset())
  rows = [*loop.run(data, 7), *loop.run(data, 3)]
  np.testing.assert_allclose([r['loss'] for r in rows], losses, rtol=1e-4)
  shapes = {name: value.shape for name, value in start.items()}
  found = state_lib.unpack(program, loop.state(), shapes)
  for name, value in end.items():
    np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize('R', [1, 2])
def test_cores_hold_their_slices(R):
  entry = layout.stacked('w', tf.TensorSpec([3], tf.float32), 4, 2)
  value = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
  devices = [f'/cpu:{core}' for core in range(4 * R)]
  variable = slices.SlicedVariable(mesh.Mesh(4, R), entry, value, devices)
  np.testing.assert_array_equal(variable.numpy(), value)
  for core, part in enumerate(variable.parts):
    np.testing.assert_array_equal(part, value[core // R : core // R + 1])
    assert part.device.endswith(f'CPU:{core}')


@pytest.mark.parametrize('R', [1, 2])
def test_a_step_takes_slices_on_a_slice(R):
  """Builds what a TPU would compile; only a TPU can run it."""
  _, program = spmd_runs.build(
    small_models.Micro, num_stages=2, num_replicas=R, schedule='gpipe'
  )
  state = [
    np.zeros(entry.spec.shape, entry.spec.dtype.as_numpy_dtype)
    for entry in program.step.state
  ]
  devices = [f'/cpu:{core}' for core in range(2 * R)]
  loop = device_loop.DeviceLoop(
    program, state, tf.distribute.get_strategy(), devices
  )
  batch = [
    np.zeros(entry.spec.shape, entry.spec.dtype.as_numpy_dtype)
    for entry in (*program.inputs, *program.targets)
  ]

  @tf.function(autograph=False)
  def build():
    return tpu.rewrite(lambda *batch: loop.step(batch), batch)

  graph = build.get_concrete_function().graph
  joined = [
    op for op in graph.get_operations() if op.type == 'TPUPartitionedInputV2'
  ]
  # Once to be read, once to be assigned.
  assert len(joined) == 2 * len(state)
  spread = [
    entry
    for entry in program.step.state
    if any(s is not None for s in entry.split)
  ]
  dims = [list(op.get_attr('partition_dims')) for op in joined]
  assert sum(bool(d) for d in dims) == 2 * len(spread)
