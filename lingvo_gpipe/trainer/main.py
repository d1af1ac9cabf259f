"""The trainer binary: flags to jobs, and mistakes to one line each."""

import contextlib
import functools
import math

import tensorflow as tf
from absl import app, flags

from lingvo_gpipe import (
  errors,
  pipeline_task,
  pipelining_params,
  runtime,
)
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.cluster import chief, health, parent, tpu
from lingvo_gpipe.plan import text as plan_text
from lingvo_gpipe.trainer import (
  checkpoints,
  cluster_options,
  evaluate,
  logdirs,
  loop,
  models,
  options,
  planning,
  replanning,
  reports,
  steps,
  stopping,
  usage,
)
from lingvo_gpipe.xla import environment

FLAGS = flags.FLAGS

# What TensorFlow raises for a worker that is gone or was started anew.
_LOST = (
  tf.errors.UnavailableError,
  tf.errors.AbortedError,
  tf.errors.CancelledError,
  tf.errors.DeadlineExceededError,
)


def run() -> None:
  """Parses flags and runs; the process ends with 2 after a user's mistake."""
  app.run(_main)


def _main(argv: list[str]) -> int:
  runtime.silence_logs()
  return errors.run_command(argv, _run_until_worker_is_lost)


def _run_until_worker_is_lost() -> int | None:
  try:
    return _run_jobs()
  except (*_LOST, health.NoAnswer) as error:
    if cluster_options.workers() is None:
      raise
    # The supervisor starts another chief, which resumes.
    if isinstance(error, health.NoAnswer):
      reports.say(error.what)
    else:
      first_line, *_ = error.message.splitlines() or ['']
      reports.say(f'the step failed: {first_line}')
    return errors.EXIT_LOST_WORKER


def _run_jobs() -> int | None:
  if FLAGS.list_models:
    return print('\n'.join(models.list_names()))
  if FLAGS.job == ['worker']:
    return cluster_options.serve()
  if not FLAGS.model:
    raise errors.UserError(
      '--model is missing; --list_models prints all names.'
    )
  unknown = set(FLAGS.job) - {'trainer', 'evaler'}
  if unknown or not FLAGS.job:
    raise errors.UserError(
      f'--job={",".join(FLAGS.job)}: choose trainer, evaler or both, or worker '
      'alone.'
    )
  is_run = FLAGS.mode == 'sync' and 'trainer' in FLAGS.job
  if is_run and cluster_options.wants_cluster():
    return cluster_options.supervise()
  key = models.find(FLAGS.model)
  task_params, train_input = options.model_params(key, 'Train')
  task_params.input = train_input
  dev_input = None
  if 'evaler' in FLAGS.job and FLAGS.mode == 'sync':
    _, dev_input = options.model_params(key, 'Dev')
  if FLAGS.mode == 'inspect_params':
    return print(task_params.ToText())
  pipeline = task_params.pipeline
  pipelining_params.check(pipeline)
  tpu_slice = _connect_tpu(pipeline) if FLAGS.tpu and is_run else None
  num_devices = _start_tensorflow(pipeline)
  machine = pipelining_params.machine(pipeline)
  if pipelining_params.open_fields(pipeline):
    machine.check(num_devices)
    found = planning.planner(task_params, num_devices).on(machine).fastest()
    reports.say(f'planned: {found.choice}')
    planning.settle(pipeline, found)
  taken = usage.Usage()
  program = options.spmd_program(task_params)
  task = task_params.Instantiate()
  forecast = plan_lib.predict(task.Plan(), machine)
  if program is None:
    taken.expect(forecast, machine, pipeline.num_replicas)
  plan = plan_text.to_text(
    task.Plan(), forecast, machine, pipeline.num_replicas
  )
  if program is not None:
    plan = f'{program.describe()}\n'
  if FLAGS.mode == 'inspect_model':
    return print(_describe_variables(task) + plan)
  if not FLAGS.logdir:
    raise errors.UserError('--logdir is missing: where shall the run be kept?')
  trace_steps = options.trace_steps()
  stop = stopping.StopRequest()
  if 'trainer' in FLAGS.job:
    texts = {'params.txt': task_params.ToText(), 'plan.txt': plan}
    with logdirs.opened(FLAGS.logdir) as resumes:
      loop.train(
        task,
        FLAGS.logdir,
        resumes,
        texts,
        dev_input,
        stop,
        taken,
        FLAGS.checkpoint_every,
        FLAGS.keep_checkpoints,
        _maker_of_steps(task, program, tpu_slice),
        trace_steps,
      )
  else:
    _evaluate_checkpoints(task, dev_input, stop)
  return None


def _maker_of_steps(task, program, tpu_slice):
  """Returns what makes the steps, given the variables by name."""
  if program is None:
    return lambda unused_variables: steps.GraphSteps(task)
  if tpu_slice is None:
    return functools.partial(steps.ProgramSteps, program)
  return functools.partial(
    steps.TpuSteps,
    program,
    tpu_slice=tpu_slice,
    steps_per_loop=FLAGS.steps_per_loop,
  )


def _connect_tpu(pipeline) -> tpu.Slice:
  """Starts TensorFlow with the cores of a TPU beside devices of this process.

  The latter hold the variables that are saved and evaluated.
  """
  count = pipelining_params.num_stages(pipeline) * pipeline.num_replicas
  runtime.prepare(count)
  if not pipeline.devices:
    pipeline.devices = [
      f'/job:localhost/task:0/device:CPU:{number}' for number in range(count)
    ]
  return tpu.connect(FLAGS.tpu, count)


def _start_tensorflow(pipeline) -> int:
  """Prepares TensorFlow with its devices, here or on workers.

  Returns:
    How many devices one replica may use.
  """
  workers = cluster_options.workers()
  if pipeline.engine == 'spmd':
    if workers is not None:
      raise errors.UserError(
        '--engine=spmd runs in one process: leave out the workers, or use '
        '--engine=mpmd.'
      )
    environment.prepare(
      pipelining_params.num_stages(pipeline) * pipeline.num_replicas
    )
  if workers is None:
    count = planning.num_devices(pipeline, FLAGS.num_devices)
    runtime.configure(count * pipeline.num_replicas)
    return count
  if FLAGS.supervisor is not None:
    parent.stop_with(FLAGS.supervisor)
  if FLAGS.on_worker_loss == 'replan':
    replanning.check(pipeline)
  names = chief.connect(workers, FLAGS.worker_wait, FLAGS.chief_port)
  runtime.configure()
  if FLAGS.on_worker_loss == 'replan':
    replanning.fit(pipeline, len(names), reports.say)
  return max(1, len(names) // pipeline.num_replicas)


def _evaluate_checkpoints(task, dev_input, stop) -> None:
  """Evaluates each checkpoint that appears, until the last step."""
  restorer = checkpoints.Checkpoints(FLAGS.logdir, task.CreateSlots())
  # It goes back on nothing, so all earlier reports stay.
  evaler = evaluate.Evaler(task, dev_input, FLAGS.logdir, math.inf)
  with contextlib.closing(evaler):
    last_step = task.params.train.max_steps
    for step in evaluate.follow(restorer, FLAGS.logdir, last_step, stop):
      reports.say(evaler.describe(evaler.evaluate(step)))


def _describe_variables(task: pipeline_task.PipelineTask) -> str:
  """Returns a line a variable: name, shape, type."""
  lines = [
    f'{v.name:<60} {v.shape.as_list()!s:<16} {v.dtype.name}'
    for v in task.vars.Flatten()
  ]
  return '\n'.join([*lines, '', ''])
