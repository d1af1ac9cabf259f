"""The training loop: batch, step, report; checkpoints as it goes."""

import os
import time
from collections.abc import Callable, Collection

from lingvo_gpipe import errors, pipeline_task
from lingvo_gpipe.engine import spmd
from lingvo_gpipe.trainer import (
  checkpoints,
  evaluate,
  reports,
  tracing,
  usage,
)
from lingvo_gpipe.trainer import steps as steps_lib

# Files of a run that a foreign logdir could hold by accident.
_RUN_FILES = ('params.txt', 'plan.txt', 'metrics.jsonl', 'eval.jsonl')


def train(
  task: pipeline_task.PipelineTask,
  logdir: str,
  texts: dict[str, str],
  dev_input,
  stop_requested: Callable[[], bool],
  taken: usage.Usage,
  checkpoint_every: int,
  keep_checkpoints: int,
  trace_steps: Collection[int] = (),
  program: spmd.Program | None = None,
) -> None:
  """Trains `task` up to its max_steps, from the newest checkpoint in `logdir`.

  Args:
    task: built, its weights freshly drawn.
    logdir: folder of the run; made if missing.
    texts: files to write into it, by name.
    dev_input: Params of the held-out input, or None to evaluate nothing.
    stop_requested: asked between steps.
    taken: what the run takes, beside what was planned.
    checkpoint_every: steps between checkpoints.
    keep_checkpoints: how many to keep.
    trace_steps: steps whose timeline to record.
    program: what makes the steps under the spmd engine; None under mpmd.

  Raises:
    UserError: `logdir` cannot be written, or belongs to something else.
  """
  resumes = open_logdir(logdir)
  data = iter(task.input.datasource.GetDataset())
  variables = task.CreateSlots()
  saver = checkpoints.Checkpoints(logdir, variables, keep_checkpoints, data)
  step = 0
  if resumes:
    path = saver.restore_newest(logdir, reports.say)
    step = checkpoints.step_of(path)
    reports.say(f'resuming from {path}')
  else:
    saver.save(0)
  for name, text in texts.items():
    with open(os.path.join(logdir, name), 'w', encoding='utf-8') as file:
      file.write(text)
  last_step = task.params.train.max_steps
  progress = reports.Progress(step, last_step)
  evaler = None
  if dev_input is not None:
    evaler = evaluate.Evaler(task, dev_input, logdir, step)
  report = reports.MetricsFile(logdir, 'metrics', step)
  steps = steps_lib.GraphSteps(task)
  if program is not None:
    steps = steps_lib.ProgramSteps(program, variables)
  tracer = tracing.Tracer(task, logdir, trace_steps)
  saved = step
  while step < last_step and not stop_requested():
    started = time.monotonic()
    run = tracer.train_step if tracer.runs(step + 1) else steps.run
    metrics = run(next(data))
    row = {name: float(value) for name, value in metrics.items()}
    seconds = time.monotonic() - started
    step += 1
    row = {
      'step': step,
      **row,
      'step_seconds': seconds,
      'tokens_per_second': row['weight'] / seconds,
      **tracer.report(step),
      **taken.row(),
    }
    report.write(row)
    progress.step(row)
    if taken.is_settled():
      reports.say(usage.describe(row))
    if tracer.is_traced(step):
      reports.say(tracing.describe(row))
    if step % checkpoint_every == 0 or step == last_step:
      steps.settle()
      saver.save(step)
      saved = step
      if evaler is not None and not stop_requested():
        reports.say(evaluate.describe(evaler.evaluate(step)))
  if saved != step:
    steps.settle()
    saver.save(step)
  progress.close()
  report.close()
  if evaler is not None:
    evaler.close()


def open_logdir(logdir: str) -> bool:
  """Makes `logdir` if missing; returns whether it has a run to go on with.

  Raises:
    UserError: it cannot be written, or holds files that no run of ours made:
      a run saves a checkpoint before it writes anything else.
  """
  try:
    os.makedirs(logdir, exist_ok=True)
  except OSError as error:
    raise errors.UserError(f'--logdir={logdir}: {error.strerror}.') from error
  if not os.access(logdir, os.W_OK | os.X_OK):
    raise errors.UserError(f'--logdir={logdir} is not writable.')
  has_checkpoint = bool(checkpoints.paths(logdir))
  found = [f for f in _RUN_FILES if os.path.exists(os.path.join(logdir, f))]
  if found and not has_checkpoint:
    raise errors.UserError(
      f'--logdir={logdir} holds {", ".join(found)} but no checkpoint, so it is '
      'not a run that can go on: choose another folder.'
    )
  return has_checkpoint
