"""Training a few steps in a test."""

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from lingvo_gpipe import pipeline_task


def make_task(model, **pipeline) -> pipeline_task.PipelineTask:
  """Builds the task of a model class, with fields of its pipeline changed."""
  p = model().Task().Set(random_seed=1)
  p.input = model().Train().Set(random_seed=1)
  p.pipeline.Set(**pipeline)
  return p.Instantiate()


def losses(model, steps: int, **pipeline) -> list[np.float32]:
  """Trains `steps` steps from step 0 and returns each loss, exactly."""
  task = make_task(model, **pipeline)
  task.CreateSlots()
  py_utils.GetGlobalStep().assign(0)
  step = tf.function(task.TrainStep, autograph=False)
  batches = iter(task.input.datasource.GetDataset())
  return [step(next(batches)).loss.numpy() for _ in range(steps)]


def relative_difference(a, b) -> np.ndarray:
  a, b = np.array(a, np.float64), np.array(b, np.float64)
  return np.abs(a - b) / np.abs(b)
