"""The evaler: the loss on held-out data."""

import time

import tensorflow as tf
from lingvo.core import cluster_factory

from lingvo_gpipe import pipeline_task
from lingvo_gpipe.trainer import checkpoints, reports


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
    row['weight'] = weights['loss']
    row['eval_seconds'] = time.monotonic() - started
    self._report.write(row)
    return row

  def close(self) -> None:
    self._report.close()


def describe(row: dict) -> str:
  """Returns the line that tells of an evaluation."""
  extra = ''.join(
    f', {name} {value:.4f}'
    for name, value in row.items()
    if name not in ('step', 'loss', 'weight', 'eval_seconds')
  )
  return f'step {row["step"]}: held-out loss {row["loss"]:.4f} nats{extra}'


def wait_for_checkpoint(
  logdir: str, evaluated: str | None, stop_requested, poll_seconds: float = 2.0
) -> str | None:
  """Waits for a checkpoint newer than `evaluated`; None if asked to stop."""
  while not stop_requested():
    path = checkpoints.latest(logdir)
    if path and path != evaluated:
      return path
    time.sleep(poll_seconds)
  return None
