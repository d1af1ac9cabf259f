"""The evaler: the loss on held-out data."""

import time
from collections.abc import Callable, Iterator

import tensorflow as tf
from lingvo.core import cluster_factory

from lingvo_gpipe import errors, pipeline_task
from lingvo_gpipe.trainer import checkpoints, reports

# How often to try a checkpoint that cannot be read.
_MOST_TRIES = 5


class Evaler:
  """Evaluates a task on its held-out data and reports as `eval.jsonl`."""

  def __init__(
    self,
    task: pipeline_task.PipelineTask,
    input_params,
    logdir: str,
    restored_step: float,
  ):
    """Sets up the input.

    Args:
      task: whose weights are evaluated; may be one in training.
      input_params: Params of the held-out input.
      logdir: folder of the run.
      restored_step: reports of later steps are dropped.
    """
    self._task = task
    with cluster_factory.SetEval(True):
      generator = input_params.Instantiate()
    dataset = generator.datasource.GetDataset()
    limit = task.params.eval.samples_per_summary
    if limit:
      dataset = dataset.take(-(-limit // input_params.batch_size))
    self._dataset = dataset
    self._loss_name = task.params.pipeline.loss_name
    self._report = reports.MetricsFile(logdir, 'eval', restored_step)
    self._fprop = tf.function(self._FProp, autograph=False)

  def _FProp(self, batch):
    with cluster_factory.SetEval(True):
      metrics, _ = self._task.FPropTower(self._task.theta, batch)
    return metrics

  def evaluate(self, step: int) -> dict[str, float]:
    """Evaluates the weights as they are, reports, and returns the averages."""
    started = time.monotonic()
    sums, weights = {}, {}
    for batch in self._dataset:
      for name, (value, weight) in self._fprop(batch).items():
        value, weight = float(value), float(weight)
        sums[name] = sums.get(name, 0.0) + value * weight
        weights[name] = weights.get(name, 0.0) + weight
    row = {'step': step}
    row |= {name: sums[name] / weights[name] for name in sums}
    row['weight'] = weights[self._loss_name]
    row['eval_seconds'] = time.monotonic() - started
    self._report.write(row)
    return row

  def describe(self, row: dict) -> str:
    """Returns the line that tells of an evaluation."""
    name = self._loss_name
    extra = ''.join(
      f', {other} {value:.4f}'
      for other, value in row.items()
      if other not in ('step', name, 'weight', 'eval_seconds')
    )
    return f'step {row["step"]}: held-out {name} {row[name]:.4f} nats{extra}'

  def close(self) -> None:
    self._report.close()


def follow(
  restorer: checkpoints.Checkpoints,
  logdir: str,
  last_step: int,
  stop_requested: Callable[[], bool],
  poll_seconds: float = 2.0,
) -> Iterator[int]:
  """Restores each checkpoint that appears, up to the last; yields its step.

  Raises:
    UserError: the last cannot be read, so that there is nothing to wait for.
  """
  done, tried, tries = None, None, 0
  while not stop_requested():
    path = checkpoints.latest(logdir)
    if path is None or path == done:
      time.sleep(poll_seconds)
      continue
    step = checkpoints.step_of(path)
    try:
      restorer.restore(path)
    except checkpoints.Damaged as error:
      # It may be in the making, or have been deleted by the trainer.
      tried, tries = path, tries + 1 if path == tried else 1
      if tries < _MOST_TRIES:
        time.sleep(poll_seconds)
        continue
      if step >= last_step:
        raise errors.UserError(
          f'{error}, and it is that of the last step: train on with a higher '
          '--max_steps, or bring it back from a copy.'
        ) from error
      reports.say(f'{error}; waiting for the next')
    else:
      yield step
      if step >= last_step:
        return
    done = path
