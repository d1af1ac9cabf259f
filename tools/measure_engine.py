"""Measures what the engine costs beside the work of the stages.

    python tools/measure_engine.py [--num_devices=8] [--num_micro_batches=32]
        [--forward_ms=5]

Stages sleep: a sleep takes no core, so any number of devices runs on two. A
device's forward of a micro-batch sleeps `forward_ms`, both halves of the
backward as long each; with several stages a device they share that. Everything
else is the real thing: PipeliningLayer, plan, engine.

Printed is the simulator's makespan as a share of the step. The simulator gets
the mean duration of each kind of action on each stage, as the stopwatch of the
engine finds it. Steps with the stopwatch and ordinary ones take turns; the
share is that of ordinary ones, "timed" that of those with the stopwatch, which
are slower. "own" is the latter when the simulator gets the duration of every
single action, so that what is missing to 1 is the engine, without the jitter of
the sleeps. The process asks for real-time priority (root has it):
what else runs on the machine is not the engine's doing.
"""

import contextlib
import ctypes
import itertools
import json
import os
import statistics
import time

import fresh_process
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('num_devices', 8, 'Devices.')
flags.DEFINE_integer('num_micro_batches', 32, 'M.')
flags.DEFINE_float('forward_ms', 5.0, 'Milliseconds of a forward.')
flags.DEFINE_list(
  'schedules',
  ['gpipe', '1f1b', 'interleaved', 'zb1p', 'zb2p', 'zbv'],
  'Which schedules.',
)
flags.DEFINE_integer('steps', 10, 'Steps to measure in a run.')
flags.DEFINE_integer('runs', 3, 'How often to measure.')
flags.DEFINE_string('only', None, 'Measure this schedule once, here.')


def main(unused_argv):
  if FLAGS.only:
    _ask_for_precise_sleeps()
    print(json.dumps(_measure(FLAGS.only)))
    return
  print(
    f'{FLAGS.num_devices} devices, {FLAGS.num_micro_batches} micro-batches, '
    f'forward {FLAGS.forward_ms:g} ms, backward {2 * FLAGS.forward_ms:g} ms'
  )
  found = {}
  for name in FLAGS.schedules:
    runs = [_measure_in_process(name) for _ in range(FLAGS.runs)]
    median = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    shares = ', '.join(f'{r["share"]:.3f}' for r in runs)
    found[name] = median['simulated'], median['step']
    print(
      f'{name:<12} step {median["step"] * 1e3:7.1f} ms, simulated '
      f'{median["simulated"] * 1e3:7.1f} ms, share {median["share"]:.3f} '
      f'(runs: {shares}); timed {median["share_of_timed"]:.3f}, own '
      f'{median["share_of_own"]:.3f}',
      flush=True,
    )
  print(_compare_ranking(found))


def _ask_for_precise_sleeps():
  """Makes threads started from here on wake up on time, where permitted.

  Other programs on the machine are no part of what is measured.
  """
  set_timer_slack = 29  # Of linux/prctl.h.
  ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)  # A nanosecond.
  with contextlib.suppress(PermissionError):
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _compare_ranking(found):
  """Says whether what is faster on paper is faster in truth."""
  wrong = [
    f'{a} before {b}'
    for a, b in itertools.permutations(found, 2)
    # Differences under a hundredth are none, on paper and in truth.
    if found[a][0] < found[b][0] * 0.99 and found[a][1] > found[b][1] * 1.01
  ]
  if wrong:
    return f"the ranking is not the simulator's: {', '.join(wrong)}"
  return "the ranking is the simulator's"


def _measure_in_process(name):
  sizes = 'num_devices', 'num_micro_batches', 'forward_ms', 'steps'
  return fresh_process.measure(__file__, [f'--only={name}'], sizes)


def _measure(name):
  """Returns seconds of a step, simulated and measured, and their shares."""
  from lingvo_gpipe import runtime

  with runtime.quiet_tensorflow():
    import tensorflow as tf
    from lingvo.core import base_layer, py_utils
    from tensorflow.python.ops import (
      gen_dataset_ops,
      gen_experimental_dataset_ops,
    )

  from lingvo_gpipe import pipelining_layer
  from lingvo_gpipe import schedule as schedule_lib
  from lingvo_gpipe.engine import stopwatch as stopwatch_lib

  tf.config.threading.set_inter_op_parallelism_threads(FLAGS.num_devices + 4)
  runtime.configure(FLAGS.num_devices)

  def sleep(x, seconds):
    # An iterator that sleeps, once for its element and once for its end: no
    # Python in it, whose way into a sleep and out of it costs 0.3 ms.
    one = gen_dataset_ops.tensor_dataset([x], [x.shape])
    slow = gen_experimental_dataset_ops.sleep_dataset(
      one, tf.constant(int(seconds / 2 * 1e6), tf.int64), [x.dtype], [x.shape]
    )
    return gen_dataset_ops.dataset_to_single_element(
      slow, [x.dtype], [x.shape]
    )[0]

  class Paced(base_layer.BaseLayer):
    """Adds its weight to its input, slowly."""

    @classmethod
    def Params(cls):
      p = super().Params()
      p.Define('seconds', 0.0, 'Of a forward, and of each half of a backward.')
      return p

    def _CreateLayerVariables(self):
      super()._CreateLayerVariables()
      zero = py_utils.WeightInit.Constant(0.0)
      self.CreateVariable('w', py_utils.WeightParams([4], zero, tf.float32))

    def FProp(self, theta, x):
      seconds = self.params.seconds

      @tf.custom_gradient
      def paced(x, w):
        def gradient(dy):
          dx = sleep(dy, seconds)
          return dx, sleep(dx[0], seconds)

        return sleep(x, seconds) + w, gradient

      return paced(x, theta.w)

  class Loss(base_layer.BaseLayer):
    """The mean square of its input."""

    def FProp(self, theta, x):
      return py_utils.NestedMap(loss=(tf.reduce_mean(x * x), tf.constant(1.0)))

  per_device = {'interleaved': 2, 'zbv': 2}.get(name, 1)
  num_stages = FLAGS.num_devices * per_device
  seconds = FLAGS.forward_ms / 1e3 / per_device
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='paced',
    cell_tpl=[
      Paced.Params().Set(name=f'stage_{k}', seconds=seconds)
      for k in range(num_stages)
    ],
    loss_tpl=Loss.Params().Set(name='loss'),
    num_micro_batches=FLAGS.num_micro_batches,
    schedule=name,
    remat='none',
  )
  pipeline = p.Instantiate()
  batch = tf.ones([FLAGS.num_micro_batches, 4])

  @tf.function(autograph=False)
  def step():
    metrics, gradients = pipeline.ForwardBackward(pipeline.theta, (batch,))
    return metrics.loss[0], gradients.Flatten()

  stopwatch = stopwatch_lib.Stopwatch()

  @tf.function(autograph=False)
  def timed_step():
    metrics, gradients = pipeline.ForwardBackward(
      pipeline.theta, (batch,), (), stopwatch
    )
    return metrics.loss[0], gradients.Flatten(), stopwatch.times()

  for function in step, timed_step:
    function()  # Traces and warms up.

  class OwnTimes(schedule_lib.Times):
    """The time of each action, as it was in one step."""

    def of(self, action):
      return own[action]

  untimed, timed, spans, shares_of_own = [], [], [], []
  schedule = pipeline.Plan((batch,)).schedule
  for _ in range(FLAGS.steps):
    started = time.perf_counter()
    step()[0].numpy()
    untimed.append(time.perf_counter() - started)
    started = time.perf_counter()
    times = timed_step()[2].numpy()
    timed.append(time.perf_counter() - started)
    timeline = stopwatch_lib.to_timeline(stopwatch.actions(), times, schedule)
    spans += timeline
    own = {span.action: span.end - span.start for span in timeline}
    by_own = OwnTimes((), (0.0,) * (num_stages - 1))
    shares_of_own.append(
      schedule_lib.makespan(schedule_lib.simulate(schedule, by_own)) / timed[-1]
    )

  by_mean = schedule_lib.mean_times(spans, num_stages)
  simulated = schedule_lib.makespan(schedule_lib.simulate(schedule, by_mean))
  return {
    'simulated': simulated,
    'step': statistics.median(untimed),
    'share': simulated / statistics.median(untimed),
    'share_of_timed': simulated / statistics.median(timed),
    'share_of_own': statistics.median(shares_of_own),
  }


if __name__ == '__main__':
  app.run(main)
