"""Measures how long layers take on the devices at hand.

Each different layer is built alone and runs forward and backward as a stage of
its own, on as many devices at once as a pipeline would keep busy: they share
cores, caches and memory, as they will then.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe import checkpointing
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.engine import program_order
from lingvo_gpipe.plan import profile
from lingvo_gpipe.stage import functions as stage_functions

# Times are medians over so many runs, after one that warms up.
_RUNS = 5
# Rounds of F, I and W inside the graph of a run.
_ROUNDS = 4


def measure_missing(
  networks: Sequence[plan_lib.Network],
  layers: Sequence[base_layer.BaseLayerParamsT],
  optimizer,
  batch_dim: int,
  loss_name: str,
  path: str,
  devices: Sequence[str],
  progress: Callable[[str], None] = lambda text: None,
) -> None:
  """Adds to the profile in `path` all layers that it does not have yet.

  Args:
    networks: the layers, traced for each size of micro-batch that matters.
    layers: their Params.
    optimizer: Params of the optimizer.
    batch_dim: which dimension counts examples.
    loss_name: the metric of the last layer that is minimised.
    path: of the file, made if missing.
    devices: TensorFlow names of devices to keep busy at once.
    progress: told what is being measured.

  Raises:
    UserError: the file is no profile, or cannot be written.
  """
  known = plan_lib.Machine()
  if os.path.exists(path):
    known = plan_lib.read_profile(path, known)
  measured, names = dict(known.measured), {}
  updates = []
  for network in networks:
    for l, key in enumerate(network.keys):
      names.setdefault(key, f'{network.names[l]} ({network.traces[l].kind})')
      if key in measured:
        continue
      progress(f'measuring {names[key]}')
      is_loss = l == len(layers) - 1
      measured[key], *update = _measure(
        network,
        l,
        layers[l],
        optimizer,
        batch_dim,
        loss_name if is_loss else None,
        devices,
      )
      updates.append(update)
  names = {key: names.get(key, '') for key in measured}
  update_seconds = known.update_seconds
  if updates:
    seconds, sizes = map(sum, zip(*updates, strict=True))
    update_seconds = seconds / max(sizes, 1)
  profile.write(path, measured, names, update_seconds)


def _measure(network, l, p, optimizer, batch_dim, loss_name, devices):
  """Returns the LayerSeconds of a layer; seconds and bytes of its update."""
  with tf.device(devices[0]):
    layer = p.Instantiate()
  wiring = network.wiring.stage(range(l, l + 1))
  functions = stage_functions.StageFunctions(
    (p.name,), [layer], network.wiring, wiring, batch_dim, loss_name
  )
  specs = [network.wiring.values[v].spec for v in wiring.takes]
  num_examples = next(s.shape[batch_dim] for s in specs if s.shape.rank)

  @tf.function(autograph=False)
  def run():
    stamps = [
      stamps
      for device in devices
      for stamps in _laps(functions, layer, specs, num_examples, device)
    ]
    graph = tf.compat.v1.get_default_graph()
    program_order.free(graph, graph.get_operations())
    return stamps

  run()
  times = np.array([[t.numpy() for t in run()] for _ in range(_RUNS)])
  # The last dimension: when a lap began, and when F, I and W ended.
  laps = np.diff(times.reshape(-1, 4), axis=1)
  forward, input_gradient, weight_gradient = np.median(laps, axis=0)
  seconds = plan_lib.LayerSeconds(
    float(forward), float(input_gradient), float(weight_gradient)
  )
  return seconds, *_update(layer, optimizer)


def _laps(functions, layer, specs, num_examples, device) -> Iterator[tf.Tensor]:
  """Adds rounds of F, I and W on a device; yields their timestamps, [4]."""
  remat = checkpointing.keep_all(1)
  after = []

  def stamp(tensors):
    with tf.control_dependencies([t.op for t in tensors]):
      return tf.timestamp()

  with tf.device(device):
    theta = [w.read_value() for w in layer.vars.Flatten()]
    inputs = [_example(spec) for spec in specs]
    rng = stage_functions.Rng(
      tf.zeros([1], tf.int64), tf.zeros([], tf.int64), tf.zeros([], tf.int64)
    )
    step = functions.step(theta, inputs, rng, num_examples)
    cotangents = [tf.ones(t.shape, t.dtype) for t in step.cotangents]
    sums = functions.zeros()
    for _ in range(_ROUNDS):
      stamps = [stamp([*theta, *inputs, *cotangents, *sums, *after])]
      known = step.start(theta, [*inputs, *rng])
      with tf.control_dependencies([stamps[-1].op]):
        outputs = step.forward(known, remat)
      stamps.append(stamp(outputs))
      for calls in (
        step.input_gradient(known, cotangents, remat),
        step.weight_gradient(known, sums, remat),
      ):
        results = [stamps[-1]]
        with tf.control_dependencies([stamps[-1].op]):
          for call in calls:
            results = call.run() or results
        stamps.append(stamp(results))
      after = [stamps[-1]]
      yield tf.stack(stamps)


def _example(spec: tf.TensorSpec) -> tf.Tensor:
  if spec.dtype.is_floating:
    return tf.random.stateless_uniform(spec.shape, [1, 2], dtype=spec.dtype)
  return tf.zeros(spec.shape, spec.dtype)


def _update(layer, optimizer) -> tuple[float, int]:
  """Returns how long clipping and the update take, for how many bytes."""
  trained = [v for v in layer.vars.Flatten() if v.trainable]
  size = sum(v.shape.num_elements() * v.dtype.size for v in trained)
  if not size:
    return 0.0, 0
  apply = optimizer.Instantiate()

  @tf.function(autograph=False)
  def update():
    began = tf.timestamp()
    with tf.control_dependencies([began]):
      gradients = [tf.zeros(v.shape, v.dtype) for v in trained]
      gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    pairs = [
      py_utils.VarGrad(v, g) for v, g in zip(trained, gradients, strict=True)
    ]
    done = apply.Apply(lambda: 0.0, py_utils.NestedMap(w=pairs))
    with tf.control_dependencies([done] if done is not None else []):
      return tf.timestamp() - began

  update()
  return statistics.median(float(update()) for _ in range(_RUNS)), size
