"""The training loop: batch, step, report; checkpoints as it goes."""

import os
import time
from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from lingvo_gpipe import pipeline_task
from lingvo_gpipe.trainer import (
  checkpoints,
  evaluate,
  reports,
  tracing,
  usage,
)
from lingvo_gpipe.trainer import steps as steps_lib


def train(
  task: pipeline_task.PipelineTask,
  logdir: str,
  resumes: bool,
  texts: dict[str, str],
  dev_input,
  stop_requested: Callable[[], bool],
  taken: usage.Usage,
  checkpoint_every: int,
  keep_checkpoints: int,
  make_steps: Callable[[Mapping[str, tf.Variable]], steps_lib.Steps],
  trace_steps: Collection[int] = (),
) -> None:
  """Trains `task` up to its max_steps, from the newest checkpoint in `logdir`.

  Args:
    task: built, its weights freshly drawn.
    logdir: folder of the run, which is this process's alone.
    resumes: whether it has a checkpoint.
    texts: files to write into it, by name.
    dev_input: Params of the held-out input, or None to evaluate nothing.
    stop_requested: asked between steps.
    taken: what the run takes, beside what was planned.
    checkpoint_every: steps between checkpoints.
    keep_checkpoints: how many to keep.
    make_steps: returns what makes the steps, given the variables by name.
    trace_steps: steps whose timeline to record.

  Raises:
    UserError: no checkpoint can be read, or it is of another model.
  """
  checkpoints.remove_leftovers(logdir)
  data = iter(task.input.datasource.GetDataset())
  variables = task.CreateSlots()
  saver = checkpoints.Checkpoints(logdir, variables, keep_checkpoints, data)
  path = saver.restore_newest(logdir, reports.say) if resumes else None
  step = 0
  if path is None:
    saver.save(0)  # Anew, if it was killed while it did so.
  else:
    step = checkpoints.step_of(path)
    reports.say(f'resuming from {path}')
  for name, text in texts.items():
    with open(os.path.join(logdir, name), 'w', encoding='utf-8') as file:
      file.write(text)
  last_step = task.params.train.max_steps

  def is_due(step):
    return step % checkpoint_every == 0 or step == last_step

  loss_name = task.params.pipeline.loss_name
  progress = reports.Progress(step, last_step, loss_name)
  evaler = None
  if dev_input is not None:
    evaler = evaluate.Evaler(task, dev_input, logdir, step)
    # The run may have ended between a checkpoint and its evaluation.
    if step and is_due(step) and reports.last_step(logdir, 'eval') < step:
      reports.say(evaler.describe(evaler.evaluate(step)))
  report = reports.MetricsFile(logdir, 'metrics', step)
  steps = make_steps(variables)
  tracer = tracing.Tracer(task, logdir, trace_steps)
  saved = step
  while step < last_step and not stop_requested():
    started = time.monotonic()
    if tracer.runs(step + 1):
      made = [tracer.train_step(next(data))]
    else:
      due = (step // checkpoint_every + 1) * checkpoint_every
      made = steps.run(data, min(due, last_step) - step)
    made = [{name: float(m) for name, m in row.items()} for row in made]
    seconds = (time.monotonic() - started) / len(made)
    for row in made:
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
    if is_due(step):
      steps.settle()
      saver.save(step)
      saved = step
      if evaler is not None and not stop_requested():
        reports.say(evaler.describe(evaler.evaluate(step)))
  if saved != step:
    steps.settle()
    saver.save(step)
  progress.close()
  report.close()
  if evaler is not None:
    evaler.close()
