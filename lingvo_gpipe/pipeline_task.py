"""A Lingvo task whose network is a pipeline that ends in its loss."""

import contextlib
import copy

import tensorflow as tf
from lingvo.core import base_model, cluster_factory, py_utils, summary_utils

from lingvo_gpipe import errors
from lingvo_gpipe.engine import stopwatch as stopwatch_lib


class PipelineTask(base_model.BaseTask):
  """Feeds batches to a PipeliningLayer and its gradients to the Learner.

  batch  --input_keys-->  layers ... loss  <--target_keys--  batch
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('pipeline', None, 'Params of the PipeliningLayer, with loss_tpl.')
    p.Define(
      'input_keys', ['ids'], 'Fields of a batch that the first layer takes.'
    )
    p.Define(
      'target_keys',
      ['labels', 'weights'],
      'Fields of a batch that the loss layer takes after the outputs.',
    )
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    if p.pipeline is None or p.pipeline.loss_tpl is None:
      raise errors.UserError(
        f'Task "{p.name}" needs a pipeline with a loss: set task.pipeline to '
        'PipeliningLayer.Params() with loss_tpl.'
      )
    pipeline = p.pipeline.Copy().Set(optimizer=optimizer_of(p))
    if p.input:
      self._batch_spec = self.input.datasource.GetDataset().element_spec
      pipeline.input_specs, pipeline.target_specs = split_batch(
        p, self._batch_spec
      )
    self.CreateChild('pipeline', pipeline)

  def _child_variable_scope_override(self):
    # Variables are named by layer alone: `<layer>/<weight>`.
    return {**super()._child_variable_scope_override(), 'pipeline': []}

  def Plan(self):
    """Returns the Plan of the pipeline for batches of the task's input."""
    return self.pipeline.Plan(*split_batch(self.params, self._batch_spec))

  def FPropTower(self, theta, input_batch):
    """Returns the metrics of a batch and no per-example tensors."""
    inputs, targets = split_batch(self.params, input_batch)
    return self.pipeline.FPropLoss(theta.pipeline, inputs, targets), {}

  def TrainStep(
    self, input_batch, stopwatch: stopwatch_lib.Stopwatch | None = None
  ) -> py_utils.NestedMap:
    """Runs one step of synchronous SGD; call it inside a tf.function.

    Args:
      input_batch: with the fields of input_keys and target_keys.
      stopwatch: to note when each action runs.

    Returns:
      Scalars: the average of each metric of the batch (`loss` and more), and
      `weight`, `grad_norm` (before clipping), `learning_rate`.
    """
    inputs, targets = split_batch(self.params, input_batch)
    with _without_summaries():
      metrics, gradients = self.pipeline.ForwardBackward(
        self.theta.pipeline, inputs, targets, stopwatch
      )
      stats = self._ApplyGradients(metrics, gradients)
    self._global_step_var.assign_add(1)
    norm = stats.get('grad_norm/all') or [
      tf.linalg.global_norm(gradients.Flatten())
    ]
    return py_utils.NestedMap(
      {name: value for name, (value, _) in metrics.items()},
      weight=metrics[self.params.pipeline.loss_name][1],
      grad_norm=norm[0],
      learning_rate=stats['learning_rate'][0],
    )

  def CreateSlots(self) -> dict[str, tf.Variable]:
    """Creates the optimizers' variables; returns all of the task's, by name."""
    # Optimizers create their variables when first traced; nothing is run.
    with tf.__internal__.FuncGraph('slots').as_default():
      with _without_summaries(), _without_clipping(self.learners):
        zero = tf.constant(0.0)
        metrics = {self.params.pipeline.loss_name: (zero, zero)}
        gradients = self.vars.pipeline.Transform(tf.zeros_like)
        self._ApplyGradients(metrics, gradients)
    step = self._global_step_var
    return {**self.GetVariablesDict(), step.name: step}

  def _ApplyGradients(self, metrics, gradients) -> dict:
    """Lets the Learners clip and apply gradients computed elsewhere."""
    by_variable = {}
    for v, gradient in zip(
      self.vars.pipeline.Flatten(), gradients.Flatten(), strict=True
    ):
      by_variable.setdefault(v.ref(), gradient)
    distinct = _distinct(self.vars.pipeline)

    def look_up(unused_loss, variables, *unused_args):
      return [by_variable[v.ref()] for v in variables]

    stats = {}
    loss = metrics[self.params.pipeline.loss_name]
    for one in self.learners:
      # Lingvo's hook for gradients that were computed elsewhere.
      one._CustomComputeGradientsFn = lambda: look_up
      wanted = one.params.loss_name or one.params.name
      _, _, learner_stats = one.Apply({wanted: loss}, distinct)
      stats.update(learner_stats)
    return stats


def _distinct(variables: py_utils.NestedMap) -> py_utils.NestedMap:
  """Leaves out variables that are there already: tied ones."""
  seen = set()

  def is_first(variable):
    is_new = variable.ref() not in seen
    seen.add(variable.ref())
    return is_new

  return variables.Filter(is_first)


def optimizer_of(p):
  """Returns the Params of the (first) optimizer of a task, or None."""
  if p.train.learner is None:
    return p.train.optimizer
  # Lingvo itself turns the one into the other when a task is built.
  return tf.nest.flatten(p.train.learner)[0].optimizer


def split_batch(p, batch) -> tuple[tuple, tuple]:
  """Returns what the first layer and the loss layer take of a batch.

  Args:
    p: Params of a PipelineTask.
    batch: NestedMap of tensors or specs.

  Raises:
    UserError: the batch lacks a field.
  """
  missing = set(p.input_keys + p.target_keys) - set(batch)
  if missing:
    raise errors.UserError(
      f'Task "{p.name}" expects the batch fields {sorted(missing)}, which '
      f'the input does not have (it has {sorted(batch)}): set input_keys and '
      'target_keys.'
    )
  return (
    tuple(batch[key] for key in p.input_keys),
    tuple(batch[key] for key in p.target_keys),
  )


@contextlib.contextmanager
def _without_summaries():
  """Keeps the Learner from making TF 1 summaries, which nobody would read.

  Nor does it compute the norms of every variable for them.
  """
  cluster = copy.deepcopy(cluster_factory.Current())
  cluster.params.add_summary = False
  norms = summary_utils.AddNormSummary
  summary_utils.AddNormSummary = lambda name, variables_and_gradients: None
  try:
    with cluster:
      yield
  finally:
    summary_utils.AddNormSummary = norms


@contextlib.contextmanager
def _without_clipping(learners):
  """Has Learners apply gradients as they are: less to trace."""
  for one in learners:
    one.AdjustGradients = lambda gradients, **unused_kwargs: (gradients, {})
  try:
    yield
  finally:
    for one in learners:
      del one.AdjustGradients
