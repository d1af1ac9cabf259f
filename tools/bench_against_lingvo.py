"""Times a training step against lingvo.core.gpipe on the same Lingvo layer.

    python tools/bench_against_lingvo.py [--runs=5]

Both run K stages on K virtual CPU devices of one process, one intra-op thread
each, plain SGD. Every run is a fresh process; the two sides alternate, and
medians over runs are printed. "To first step" is from Params to the end of the
first step, imports apart.
"""

import json
import statistics
import time

import fresh_process
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('runs', 5, 'How often to run each side.')
flags.DEFINE_integer('steps', 7, 'Steps timed in a run, after the first.')
flags.DEFINE_enum('side', None, ['ours', 'lingvo'], 'Run one side, once.')
flags.DEFINE_string('remat', 'except_last', 'remat of our side.')
flags.DEFINE_integer('stages', 4, 'K.')
flags.DEFINE_integer('micro_batches', 32, 'M.')
flags.DEFINE_integer('layers', 16, 'L.')

MODEL_DIM, TIME, BATCH, HEADS, HIDDEN = 128, 64, 64, 8, 512


def main(unused_argv):
  if FLAGS.side:
    print(json.dumps({'ours': _run_ours, 'lingvo': _run_lingvo}[FLAGS.side]()))
    return
  results = {
    'lingvo.core.gpipe': [],
    'ours, remat=full': [],
    'ours, remat=except_last': [],
    'ours, remat=none': [],
  }
  for run in range(FLAGS.runs):
    for name, runs in results.items():
      runs.append(_run_in_process(name))
      print(f'run {run}: {name}: {runs[-1]}', flush=True)
  print(f'\nmedians of {FLAGS.runs} runs')
  medians = {
    name: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    for name, runs in results.items()
  }
  base = medians['lingvo.core.gpipe']
  for name, m in medians.items():
    print(
      f'{name:<24} step {m["step"]:.3f} s ({base["step"] / m["step"]:.2f} x), '
      f'to first step {m["first"]:.1f} s, peak RSS {m["rss_mb"]:.0f} MB, '
      f'first loss {m["loss"]:.6f}'
    )


def _run_in_process(name):
  side = 'lingvo' if name.startswith('lingvo') else 'ours'
  arguments = [f'--side={side}']
  if side == 'ours':
    arguments.append(f'--remat={name.rpartition("=")[2]}')
  return fresh_process.measure(__file__, arguments, _SIZE_FLAGS)


_SIZE_FLAGS = ('steps', 'stages', 'micro_batches', 'layers')


def _block_params():
  """Params of the layer that both sides run."""
  import numpy as np
  import tensorflow as tf
  from lingvo.core import base_layer, py_utils

  class Block(base_layer.BaseLayer):
    """A pre-norm Transformer block with no mask and no dropout."""

    def _CreateLayerVariables(self):
      shapes = {name: (MODEL_DIM, MODEL_DIM) for name in ('q', 'k', 'v', 'o')}
      shapes |= {'w1': (MODEL_DIM, HIDDEN), 'w2': (HIDDEN, MODEL_DIM)}
      random = np.random.RandomState(int(self.params.name[1:]))
      for name, shape in shapes.items():
        value = random.randn(*shape).astype('f') * 0.02
        init = py_utils.WeightInit.CustomVarInit(
          lambda *unused_args, value=value, **unused_kwargs: tf.constant(value)
        )
        self.CreateVariable(
          name, py_utils.WeightParams(list(shape), init, tf.float32)
        )

    def FProp(self, theta, x):
      def norm(x):
        d = x - tf.reduce_mean(x, -1, keepdims=True)
        return d * tf.math.rsqrt(
          tf.reduce_mean(d * d, -1, keepdims=True) + 1e-6
        )

      def heads(y):
        y = tf.reshape(y, [-1, TIME, HEADS, MODEL_DIM // HEADS])
        return tf.transpose(y, [0, 2, 1, 3])

      h = tf.reshape(norm(x), [-1, MODEL_DIM])
      q, k, v = (heads(tf.matmul(h, theta[name])) for name in 'qkv')
      probs = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 4.0)
      context = tf.transpose(tf.matmul(probs, v), [0, 2, 1, 3])
      context = tf.reshape(context, [-1, MODEL_DIM])
      x += tf.reshape(tf.matmul(context, theta.o), [-1, TIME, MODEL_DIM])
      h = tf.nn.relu(tf.matmul(tf.reshape(norm(x), [-1, MODEL_DIM]), theta.w1))
      return x + tf.reshape(tf.matmul(h, theta.w2), [-1, TIME, MODEL_DIM])

    @classmethod
    def FPropMeta(cls, p, *args):
      return py_utils.NestedMap(flops=1, out_shapes=args)

  return [Block.Params().Set(name=f'b{l}') for l in range(FLAGS.layers)]


def _inputs():
  import numpy as np

  return np.random.RandomState(0).randn(BATCH, TIME, MODEL_DIM).astype('f')


def _time(step, started):
  """Times steps; `step()` runs one and returns the loss."""
  import resource

  loss = step()
  first = time.perf_counter() - started
  seconds = []
  for _ in range(FLAGS.steps):
    begun = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - begun)
  rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  return {
    'step': statistics.median(seconds),
    'first': first,
    'loss': float(loss),
    'rss_mb': rss,
  }


def _run_ours():
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf
  tf.config.threading.set_intra_op_parallelism_threads(1)
  runtime.configure(FLAGS.stages)
  from lingvo.core import base_layer, py_utils

  from lingvo_gpipe import pipelining_layer

  class MeanSquare(base_layer.BaseLayer):
    """Loss: the mean square of all elements."""

    def FProp(self, theta, x):
      weight = tf.constant(float(x.shape[0]))
      return py_utils.NestedMap(loss=(tf.reduce_mean(x * x), weight))

  layers = _block_params()
  x = tf.constant(_inputs())
  started = time.perf_counter()
  pipeline = (
    pipelining_layer.PipeliningLayer.Params()
    .Set(
      name='pipeline',
      layer_tpl=layers,
      loss_tpl=MeanSquare.Params().Set(name='loss'),
      num_stages=FLAGS.stages,
      num_micro_batches=FLAGS.micro_batches,
      remat=FLAGS.remat,
      input_specs=[tf.TensorSpec(x.shape, x.dtype)],
    )
    .Instantiate()
  )

  @tf.function(autograph=False)
  def step(x):
    metrics, gradients = pipeline.ForwardBackward(pipeline.theta, (x,))
    for v, g in zip(pipeline.vars.Flatten(), gradients.Flatten(), strict=True):
      v.assign_sub(0.01 * g)
    return metrics.loss[0]

  return _time(lambda: float(step(x)), started)


def _run_lingvo():
  from lingvo_gpipe import lingvo_native

  lingvo_native.install()
  import tensorflow.compat.v1 as tf
  from lingvo.core import cluster_factory, gpipe, py_utils

  flags.FLAGS.set_default('stateless_vars_init', True)

  tf.disable_eager_execution()
  layers = _block_params()
  x_value = _inputs()
  started = time.perf_counter()
  cluster = cluster_factory.Current().params.Copy()
  cluster.Set(job='trainer_client', mode='sync', split_id=0)
  cluster.worker.Set(
    cpus_per_replica=FLAGS.stages,
    devices_per_split=FLAGS.stages,
    name='/job:localhost',
    replicas=1,
  )
  with tf.Graph().as_default(), cluster.Instantiate():
    py_utils.GetOrCreateGlobalStepVar()
    per_stage = FLAGS.layers // FLAGS.stages
    cells = [
      gpipe.FeatureExtractionLayer.Params().Set(
        name=f's{k}', sub=layers[k * per_stage : (k + 1) * per_stage]
      )
      for k in range(FLAGS.stages)
    ]
    pipeline = (
      gpipe.PipeliningLayer.Params()
      .Set(
        name='pipeline',
        num_micro_batches=FLAGS.micro_batches,
        cell_tpl=cells,
      )
      .Instantiate()
    )
    y = pipeline.FPropDefaultTheta(tf.constant(x_value))
    loss = tf.reduce_mean(tf.square(y))
    variables = tf.trainable_variables()
    updates = [
      tf.assign_sub(v, 0.01 * g)
      for v, g in zip(variables, tf.gradients(loss, variables), strict=True)
    ]
    config = tf.ConfigProto(
      device_count={'CPU': FLAGS.stages}, intra_op_parallelism_threads=1
    )
    with tf.Session(config=config) as session:
      session.run(tf.global_variables_initializer())
      return _time(lambda: session.run([loss, *updates])[0], started)


if __name__ == '__main__':
  app.run(main)
