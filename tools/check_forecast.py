"""Compares what the planner predicts with what a process really takes.

    python tools/check_forecast.py --what=memory [--models=lm.byte_lm.Small,...]
        [--remats=none,full,budget] [--stage=1] [--runs=3]
    python tools/check_forecast.py --what=time [--runs=3]

memory: a fresh process builds one stage of the model, alone, with Adam, and
trains it with as many micro-batches in flight as the plan says. Its growth is
that of resident memory while weights and slots are made, and the rise of the
peak (VmHWM) during a step after the first. Freed memory goes back to the system
before each (malloc_trim), and oneDNN is off, whose allocator would keep it. The
budget is halfway between what none and full take.

time: the layers are profiled, then the model trains at K = 2; the median of its
steps is compared with the plan's.
"""

import ctypes
import json
import os
import re
import statistics
import tempfile
import time

import fresh_process
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_enum('what', 'memory', ['memory', 'time'], 'What to compare.')
flags.DEFINE_list(
  'models',
  ['lm.byte_lm.Small'],
  'Models; for memory, of layers that take one tensor from the one before.',
)
flags.DEFINE_list('remats', ['none', 'full', 'budget'], 'Which remats.')
flags.DEFINE_integer('stage', 1, 'Which stage to run alone; not the last.')
flags.DEFINE_integer('stages', 4, 'K.')
flags.DEFINE_integer('micro_batches', 8, 'M.')
flags.DEFINE_integer('runs', 3, 'How often to measure each.')
flags.DEFINE_integer('steps', 10, 'Steps to measure the time of.')
flags.DEFINE_string('budget', '', 'Memory for remat=budget.')
flags.DEFINE_list('only', None, 'Model and remat to measure once, here.')


def main(unused_argv):
  if FLAGS.only:
    measure = _measure_memory if FLAGS.what == 'memory' else _measure_time
    print(json.dumps(measure(*FLAGS.only)))
    return
  unit = 'MB' if FLAGS.what == 'memory' else 's'
  for model in FLAGS.models:
    predictions = {}
    for remat in FLAGS.remats:
      budget = ''
      if remat == 'budget':
        budget = (predictions['none'] + predictions['full']) / 2
      runs = [_in_process(model, remat, budget) for _ in range(FLAGS.runs)]
      predicted = statistics.median(r['predicted'] for r in runs)
      measured = statistics.median(r['measured'] for r in runs)
      predictions[remat] = predicted * 1e6
      single = ', '.join(f'{r["measured"]:.4g}' for r in runs)
      print(
        f'{model:<32} {remat:<12} predicted {predicted:9.4g} {unit}, measured '
        f'{measured:9.4g} {unit}, {predicted / measured - 1:+.1%} (runs: '
        f'{single})',
        flush=True,
      )


def _in_process(model, remat, budget):
  return fresh_process.measure(
    __file__,
    [f'--only={model},{remat}', f'--budget={budget}'],
    ('what', 'stage', 'stages', 'micro_batches', 'steps'),
    {'TF_ENABLE_ONEDNN_OPTS': '0'} if FLAGS.what == 'memory' else {},
  )


def _params(model):
  """Returns the Params of the task, configured as the flags say."""
  from lingvo import model_registry

  from lingvo_gpipe.trainer import models

  p = model_registry._ModelRegistryHelper.GetParams(models.find(model), 'Train')
  p.task.Set(input=p.input, random_seed=0)
  return p.task


def _measure_memory(model, remat):
  """Returns megabytes that one stage takes."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf
    from lingvo.core import py_utils

    from lingvo_gpipe import micro_batches, pipelining_layer, pipelining_params
    from lingvo_gpipe import plan as plan_lib
    from lingvo_gpipe.schedule import memory
    from lingvo_gpipe.trainer import planning
  runtime.configure(1)
  p = _params(model)
  p.pipeline.Set(
    num_stages=FLAGS.stages,
    num_micro_batches=FLAGS.micro_batches,
    remat='none',
  )
  whole = planning.planner(p, FLAGS.stages).fastest().plan
  stage = whole.stages[FLAGS.stage]
  in_flight = memory.stage_peaks(whole.schedule)[FLAGS.stage]
  loss = _sum_of_squares()
  specs = [whole.wiring.values[v].spec for v in stage.wiring.takes]
  size, M = whole.micro_batch_sizes[0], FLAGS.micro_batches
  specs = tuple(
    micro_batches.with_batch_size(spec, 0, size * M) for spec in specs
  )
  layers, _ = pipelining_params.list_layers(p.pipeline)
  with tempfile.NamedTemporaryFile('w', suffix='.txt') as schedule:
    schedule.write(_one_stage(in_flight, M))
    schedule.flush()
    pipeline = pipelining_layer.PipeliningLayer.Params().Set(
      name='alone',
      layer_tpl=[layers[l] for l in stage.layers],
      loss_tpl=loss.Params().Set(name='sum_of_squares'),
      num_micro_batches=M,
      schedule_file=schedule.name,
      input_specs=specs,
      remat=remat,
      device_memory=FLAGS.budget or None,
      optimizer=p.train.optimizer,
    )
    batch = tuple(_example(spec) for spec in specs)
    before = _trimmed()
    layer = pipeline.Instantiate()
    optimizer = p.train.optimizer.Instantiate()
    variables = [v for v in layer.vars.Flatten() if v.trainable]

    def update(gradients):
      pairs = [
        py_utils.VarGrad(v, g)
        for v, g in zip(variables, gradients, strict=True)
      ]
      optimizer.Apply(lambda: 1e-3, py_utils.NestedMap(w=pairs))

    with tf.__internal__.FuncGraph('slots').as_default():
      update([tf.zeros(v.shape, v.dtype) for v in variables])
    made = _trimmed() - before

    @tf.function(autograph=False)
    def step(batch):
      metrics, gradients = layer.ForwardBackward(layer.theta, batch)
      update([g for g in gradients.Flatten() if g is not None])
      return metrics.loss[0]

    step(batch)
    plan = layer.Plan(batch)
  before = _trimmed()
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
    file.write('5')  # Forgets the peak so far.
  float(step(batch))
  rise = _status('VmHWM') - before
  # The batch was there before; the plan counts it.
  there = sum(t.shape.num_elements() * t.dtype.size for t in batch)
  [predicted] = plan_lib.predict(plan, plan_lib.Machine()).device_bytes
  return {
    'predicted': predicted / 1e6,
    'measured': (made + rise + there) / 1e6,
  }


def _one_stage(in_flight, num_micro_batches):
  """Returns the schedule of a stage that holds so many micro-batches."""
  actions = [f'0F{i}' for i in range(in_flight)]
  for i in range(num_micro_batches):
    actions.append(f'0B{i}')
    if i + in_flight < num_micro_batches:
      actions.append(f'0F{i + in_flight}')
  return ' '.join(actions)


def _sum_of_squares():
  import tensorflow as tf
  from lingvo.core import base_layer, py_utils

  class SumOfSquares(base_layer.BaseLayer):
    """Stands for the stages after this one."""

    def FProp(self, theta, *outputs):
      loss = tf.add_n([tf.nn.l2_loss(t) for t in outputs])
      return py_utils.NestedMap(loss=(loss, tf.constant(1.0)))

  return SumOfSquares


def _example(spec):
  import tensorflow as tf

  if spec.dtype.is_floating:
    return tf.random.stateless_uniform(spec.shape, [1, 2], dtype=spec.dtype)
  return tf.zeros(spec.shape, spec.dtype)


def _measure_time(model, remat):
  """Returns seconds of a step at K = 2, from a fresh profile and real."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf

    from lingvo_gpipe import pipelining_params
    from lingvo_gpipe import plan as plan_lib
    from lingvo_gpipe.trainer import planning
  runtime.configure(2)
  p = _params(model)
  p.pipeline.Set(
    num_stages=2, num_micro_batches=FLAGS.micro_batches, remat=remat
  )
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'profile.json')
    planning.profile(p, planning.planner(p, 2), path, 2, lambda text: None)
    p.pipeline.profile = path
    machine = pipelining_params.machine(p.pipeline)
    task = p.Instantiate()
  predicted = plan_lib.predict(task.Plan(), machine).step_seconds
  task.CreateSlots()
  step = tf.function(task.TrainStep, autograph=False)
  batches = iter(task.input.datasource.GetDataset())
  step(next(batches))
  seconds = []
  for _ in range(FLAGS.steps):
    batch = next(batches)
    started = time.perf_counter()
    float(step(batch).loss)
    seconds.append(time.perf_counter() - started)
  return {'predicted': predicted, 'measured': statistics.median(seconds)}


def _trimmed():
  """Returns resident bytes once freed memory is given back."""
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  return _status('VmRSS')


def _status(field):
  """Returns a field of this process's status, in bytes."""
  with open('/proc/self/status', encoding='ascii') as file:
    return int(re.search(rf'{field}:\s+(\d+) kB', file.read()).group(1)) * 1024


if __name__ == '__main__':
  app.run(main)
