"""The trainer binary: flags to jobs, and mistakes to one line each."""

import contextlib
import math

from absl import app, flags

from lingvo_gpipe import errors, pipeline_task, pipelining_params, runtime
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe.plan import text as plan_text
from lingvo_gpipe.trainer import (
  checkpoints,
  evaluate,
  loop,
  models,
  options,
  planning,
  reports,
  stopping,
  usage,
)

FLAGS = flags.FLAGS


def run() -> None:
  """Parses flags and runs; the process ends with 2 after a user's mistake."""
  app.run(_main)


def _main(argv: list[str]) -> int:
  runtime.silence_logs()
  return errors.run_command(argv, _run_jobs)


def _run_jobs() -> None:
  if FLAGS.list_models:
    print('\n'.join(models.list_names()))
    return
  if not FLAGS.model:
    raise errors.UserError(
      '--model is missing; --list_models prints all names.'
    )
  unknown = set(FLAGS.job) - {'trainer', 'evaler'}
  if unknown or not FLAGS.job:
    raise errors.UserError(
      f'--job={",".join(FLAGS.job)}: choose trainer, evaler or both.'
    )
  key = models.find(FLAGS.model)
  task_params, train_input = options.model_params(key, 'Train')
  task_params.input = train_input
  dev_input = None
  if 'evaler' in FLAGS.job and FLAGS.mode == 'sync':
    _, dev_input = options.model_params(key, 'Dev')
  if FLAGS.mode == 'inspect_params':
    print(task_params.ToText())
    return
  pipeline = task_params.pipeline
  pipelining_params.check(pipeline)
  devices = planning.num_devices(pipeline, FLAGS.num_devices)
  runtime.configure(devices * pipeline.num_replicas)
  machine = pipelining_params.machine(pipeline)
  if pipelining_params.open_fields(pipeline):
    machine.check(devices)
    found = planning.planner(task_params, devices).on(machine).fastest()
    reports.say(f'planned: {found.choice}')
    planning.settle(pipeline, found)
  taken = usage.Usage()
  task = task_params.Instantiate()
  forecast = plan_lib.predict(task.Plan(), machine)
  taken.expect(forecast, machine, pipeline.num_replicas)
  plan = plan_text.to_text(
    task.Plan(), forecast, machine, pipeline.num_replicas
  )
  if FLAGS.mode == 'inspect_model':
    print(_describe_variables(task) + plan)
    return
  if not FLAGS.logdir:
    raise errors.UserError('--logdir is missing: where shall the run be kept?')
  trace_steps = options.trace_steps()
  stop = stopping.StopRequest()
  if 'trainer' in FLAGS.job:
    texts = {'params.txt': task_params.ToText(), 'plan.txt': plan}
    loop.train(
      task,
      FLAGS.logdir,
      texts,
      dev_input,
      stop,
      taken,
      FLAGS.checkpoint_every,
      FLAGS.keep_checkpoints,
      trace_steps,
    )
  else:
    _evaluate_checkpoints(task, dev_input, stop)


def _evaluate_checkpoints(task, dev_input, stop) -> None:
  """Evaluates each checkpoint that appears, until the last step."""
  restorer = checkpoints.Checkpoints(FLAGS.logdir, task.CreateSlots())
  # It goes back on nothing, so all earlier reports stay.
  evaler = evaluate.Evaler(task, dev_input, FLAGS.logdir, math.inf)
  with contextlib.closing(evaler):
    path = None
    step = -1
    while step < task.params.train.max_steps:
      path = evaluate.wait_for_checkpoint(FLAGS.logdir, path, stop)
      if path is None:
        return
      restorer.restore(path)
      step = checkpoints.step_of(path)
      reports.say(evaluate.describe(evaler.evaluate(step)))


def _describe_variables(task: pipeline_task.PipelineTask) -> str:
  """Returns a line a variable: name, shape, type."""
  lines = [
    f'{v.name:<60} {v.shape.as_list()!s:<16} {v.dtype.name}'
    for v in task.vars.Flatten()
  ]
  return '\n'.join([*lines, '', ''])
