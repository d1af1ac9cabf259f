"""Traced steps: when each action of a real step ran, beside the prediction."""

import os
from collections.abc import Collection

import tensorflow as tf

from lingvo_gpipe import pipeline_task
from lingvo_gpipe import plan as plan_lib
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.engine import stopwatch as stopwatch_lib
from lingvo_gpipe.schedule import chrome_trace, picture, shares


class Tracer:
  """Runs those steps that are to be traced, with the same numbers as others."""

  def __init__(
    self,
    task: pipeline_task.PipelineTask,
    logdir: str,
    steps: Collection[int],
  ):
    """Sets up; the timed step is traced when the first one is due.

    Args:
      task: to train.
      logdir: where timelines are written.
      steps: which steps to trace.
    """
    self._task = task
    self._logdir = logdir
    self._steps = frozenset(steps)
    self._timed_step = tf.function(self._TimedStep, autograph=False)

  def _TimedStep(self, batch):
    self._stopwatch = stopwatch_lib.Stopwatch()
    metrics = self._task.TrainStep(batch, self._stopwatch)
    return metrics, self._stopwatch.times()

  def is_traced(self, step: int) -> bool:
    return step in self._steps

  def runs(self, step: int) -> bool:
    """Returns whether `step` is to run here.

    So does the step before a traced one: TensorFlow prepares a graph when it
    runs for the first time, and that is not to be seen in the timeline.
    """
    return self.is_traced(step) or self.is_traced(step + 1)

  def train_step(self, batch) -> dict[str, tf.Tensor]:
    """Runs a step and returns its metrics."""
    metrics, self._stamps = self._timed_step(batch)
    return metrics

  def report(self, step: int) -> dict[str, float]:
    """Writes the timeline of `step`, which has just run; returns its figures.

    Returns nothing for a step that is not traced.
    """
    if not self.is_traced(step):
      return {}
    plan = self._task.Plan()
    measured = stopwatch_lib.to_timeline(
      self._stopwatch.actions(), self._stamps.numpy(), plan.schedule
    )
    simulated = schedule_lib.simulate(
      plan.schedule, schedule_lib.mean_times(measured, plan.num_stages)
    )
    self._write(step, measured, simulated)
    return figures(plan, measured, simulated)

  def _write(self, step, measured, simulated):
    timelines = {
      f'step {step}, measured': measured,
      'simulated with the mean times of its actions': simulated,
    }
    path = os.path.join(self._logdir, f'timeline-{step}')
    picture.save(timelines, f'{path}.png', unit='s')
    with open(f'{path}.json', 'w', encoding='utf-8') as file:
      file.write(chrome_trace.to_json(timelines))


def figures(
  plan: plan_lib.Plan,
  measured: schedule_lib.Timeline,
  simulated: schedule_lib.Timeline,
) -> dict[str, float]:
  """Returns what was measured, beside it what was predicted.

  `planned` is the simulation from FLOPs, made before anything was built;
  `simulated` the one from the mean times that were measured, so the difference
  to that is what the engine and the changing of times cost.
  """
  K = plan.num_stages
  forecast = plan_lib.predict(plan, plan_lib.Machine())
  planned = schedule_lib.simulate(plan.schedule, forecast.times)
  row = {
    'bubble': schedule_lib.bubble(measured),
    'bubble_planned': schedule_lib.bubble(planned),
    'bubble_simulated': schedule_lib.bubble(simulated),
    'pipeline_seconds': schedule_lib.makespan(measured),
    'pipeline_seconds_simulated': schedule_lib.makespan(simulated),
    'recompute_share': shares.recompute(measured),
    'recompute_share_planned': forecast.recompute_share,
    'transfer_wait': shares.transfer_wait(measured, K),
    'transfer_wait_planned': shares.transfer_wait(planned, K),
  }
  for k, (share, share_planned) in enumerate(
    zip(
      shares.busy_by_stage(measured, K),
      shares.busy_by_stage(planned, K),
      strict=True,
    )
  ):
    row[f'busy_stage_{k}'] = share
    row[f'busy_stage_{k}_planned'] = share_planned
  return row


def describe(row: dict) -> str:
  """Returns the line that tells of a traced step."""
  return (
    f'step {row["step"]}: bubble {row["bubble"]:.1%} (planned '
    f'{row["bubble_planned"]:.1%}), recompute {row["recompute_share"]:.1%} '
    f'(planned {row["recompute_share_planned"]:.1%}); timeline-{row["step"]}'
    '.png and .json'
  )
