"""Compares what the planner predicts with what a process really takes.

    python tools/check_forecast.py --what=memory [--models=lm.byte_lm.Small,...]
        [--remats=none,full,budget] [--stage=1] [--runs=3]
    python tools/check_forecast.py --what=time [--runs=3]

memory: a fresh process builds one stage of the model, alone, with Adam, and
trains it with as many micro-batches in flight as the plan says. Its growth is
that of resident memory while weights and slots are made, and the rise of the
peak (VmHWM) during a step after the first. Freed memory goes back to the system
before each (malloc_trim), oneDNN is off, whose allocator would keep it, and
every tensor is mapped by itself, so that holes between tensors (another 10 to
20 % with glibc's defaults) do not count. The budget is halfway between what
none and full take.

time: the layers are profiled, then the model trains at K = 2; the median of its
steps is compared with the plan's.
"""

import ctypes
import dataclasses
import json
import os
import re
import statistics
import tempfile
import time

import fresh_process
from absl import app, flags

_EXACT_MEMORY = {
  'TF_ENABLE_ONEDNN_OPTS': '0',
  'MALLOC_MMAP_THRESHOLD_': '65536',
  'MALLOC_MMAP_MAX_': '1000000',
}

FLAGS = flags.FLAGS
flags.DEFINE_enum('what', 'memory', ['memory', 'time'], 'What to compare.')
flags.DEFINE_list('models', ['lm.byte_lm.Small'], 'Models by name.')
flags.DEFINE_list('remats', ['none', 'full', 'budget'], 'Which remats.')
flags.DEFINE_integer('stage', 1, 'Which stage to run alone.')
flags.DEFINE_integer('stages', 4, 'K.')
flags.DEFINE_integer('micro_batches', 8, 'M.')
flags.DEFINE_integer('batch_size', 0, "Examples; 0 for the model's own.")
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
    ('what', 'stage', 'stages', 'micro_batches', 'steps', 'batch_size'),
    _EXACT_MEMORY if FLAGS.what == 'memory' else {},
  )


def _params(model):
  """Returns the Params of the task, configured as the flags say."""
  from lingvo import model_registry

  from lingvo_gpipe.trainer import models

  p = model_registry._ModelRegistryHelper.GetParams(models.find(model), 'Train')
  if FLAGS.batch_size:
    p.input.batch_size = FLAGS.batch_size
  p.task.Set(input=p.input, random_seed=0)
  return p.task


def _measure_memory(model, remat):
  """Returns megabytes that one stage takes, as planned and as measured."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf

    from lingvo_gpipe import pipelining_params
    from lingvo_gpipe import stage as stage_lib
    from lingvo_gpipe.plan import wiring as wiring_lib
  runtime.configure(1)
  p = _params(model)
  k = FLAGS.stage
  plan, predicted = _plan(p, remat)
  wiring = plan.stages[k].wiring
  batch = {
    v: _example(plan.wiring.values[v].spec, plan.num_micro_batches)
    for v in wiring.takes
    if plan.wiring.values[v].maker == wiring_lib.OUTSIDE
  }
  layer_params, _ = pipelining_params.list_layers(p.pipeline)
  before = _trimmed()
  layers = {l: layer_params[l].Instantiate() for l in plan.stages[k].layers}
  variables = [v for l in layers.values() for v in l.vars.Flatten()]
  update = _updater(p, [v for v in variables if v.trainable])
  made = _trimmed() - before
  [stage] = stage_lib.build_stages(
    dataclasses.replace(plan, stages=(plan.stages[k],)),
    [layers.get(l) for l in range(len(plan.names))],
    0,
    p.pipeline.batch_dim,
    p.pipeline.loss_name if k == plan.num_stages - 1 else None,
  )

  @tf.function(autograph=False)
  def step(batch, value):
    update(_one_stage(plan, k, stage, variables, batch, value))

  step(batch, tf.constant(0.5))
  before = _trimmed()
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
    file.write('5')  # Forgets the peak so far.
  step(batch, tf.constant(0.5))
  rise = _status('VmHWM') - before
  # The batch was there before; the plan counts it.
  there = sum(t.shape.num_elements() * t.dtype.size for t in batch.values())
  return {
    'predicted': predicted / 1e6,
    'measured': (made + rise + there) / 1e6,
  }


def _plan(p, remat):
  """Returns the plan and the bytes that it promises for the stage in question.

  The cuts are those without remat, whatever the remat, and the budget is that
  of this one stage.
  """
  from lingvo_gpipe import plan as plan_lib
  from lingvo_gpipe.trainer import planning

  p.pipeline.Set(
    num_stages=FLAGS.stages,
    num_micro_batches=FLAGS.micro_batches,
    remat='none',
  )
  plan = planning.planner(p, FLAGS.stages).fastest().plan
  memory = [1e18] * FLAGS.stages
  if FLAGS.budget:
    memory[FLAGS.stage] = float(FLAGS.budget)
  machine = plan_lib.Machine(memory=tuple(memory))
  costs = plan_lib.Costs(plan.network, machine)
  cuts = [stage.layers for stage in plan.stages]
  plan = plan_lib.make_plan(
    plan.network,
    plan.micro_batch_sizes,
    plan.schedule,
    [stage.device for stage in plan.stages],
    remat,
    cuts,
    plan_lib.remats(costs, plan.schedule, remat, cuts),
  )
  return plan, plan_lib.predict(plan, machine).device_bytes[FLAGS.stage]


def _updater(p, trained):
  """Returns a function that applies gradients, its slots made."""
  import tensorflow as tf
  from lingvo.core import py_utils

  optimizer = p.train.optimizer.Instantiate()

  def update(gradients):
    pairs = [
      py_utils.VarGrad(v, g) for v, g in zip(trained, gradients, strict=True)
    ]
    optimizer.Apply(lambda: 1e-3, py_utils.NestedMap(w=pairs))

  with tf.__internal__.FuncGraph('slots').as_default():
    update([tf.zeros(v.shape, v.dtype) for v in trained])
  return update


def _one_stage(plan, k, stage, variables, batch, value):
  """Adds one stage's actions to the graph, in order; returns gradients.

  What other stages would send is made when it is needed.
  """
  import tensorflow as tf

  from lingvo_gpipe import micro_batches
  from lingvo_gpipe.stage import functions as stage_functions

  values = plan.wiring.values
  sizes = plan.micro_batch_sizes
  theta = [v.read_value() for v in variables]
  zero = tf.zeros([], tf.int64)
  rng = stage_functions.Rng(tf.constant(stage.seeds), zero, zero)
  batch = {v: micro_batches.split(t, sizes, 0) for v, t in batch.items()}
  sums = stage.functions.zeros()
  known, last = {}, sums[0]

  def sent(t):
    return tf.fill(t.shape, tf.cast(value, t.dtype))

  for action in plan.schedule[k]:
    i = action.micro_batch
    with tf.control_dependencies([last.op]):
      if action.kind == 'F':
        inputs = [
          batch[v][i] if v in batch else sent(values[v].spec)
          for v in stage.plan.wiring.takes
        ]
        step = stage.functions.step(theta, inputs, rng, sizes[i])
        known[i] = step.start(theta, [*inputs, *rng])
        results = step.forward(known[i], plan.remat_of(k, i))
      else:
        cotangents = [sent(t) for t in step.cotangents]
        results = [last]
    if action.kind == 'B':
      there = known.pop(i)
      for call in step.backward(there, cotangents, sums, plan.remat_of(k, i)):
        with tf.control_dependencies([t.op for t in results]):
          results = call.run()
      sums = step.sums(there)
    last = results[0]
  return stage.functions.scale(sums, value)


def _example(spec, num_micro_batches):
  """Returns a mini-batch of as many micro-batches like `spec`."""
  import tensorflow as tf

  size, *shape = spec.shape
  shape = [size * num_micro_batches, *shape]
  if spec.dtype.is_floating:
    return tf.random.stateless_uniform(shape, [1, 2], dtype=spec.dtype)
  return tf.zeros(shape, spec.dtype)


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
