"""An optimizer's update as a pure function.

Lingvo's optimizers change variables; a program of loops that updates one layer
after the other has none. So the update of one weight is traced on variables
that are never made, and cut into what it reads, what it computes, and what it
writes:

    weight, slots, shared  --reads-->  computations  --writes-->  new values
    gradient, learning rate --------^                (_WRITES)

Slots are like the weight (Adam's moments); shared variables belong to all
weights (Adam's powers of beta).
"""

from collections.abc import Sequence

import tensorflow as tf
from lingvo.core import optimizer, py_utils

from lingvo_gpipe import errors, graph_walk
from lingvo_gpipe.cost import apart


class Update:
  """How an optimizer updates a weight of one shape.

  Attributes:
    slots: their names below the weight's, such as "Adam_1".
    shared: names of the variables for all weights.
  """

  def __init__(self, p: optimizer.Base.Params, spec: tf.TensorSpec):
    """Traces the update.

    Args:
      p: Params of a Lingvo optimizer.
      spec: of the weight.

    Raises:
      UserError: it changes variables in a way that is not known here.
    """
    self._optimizer = p.name
    traced = apart.build_apart(_trace, p, spec)
    self._graph, self._gradient, self._rate, update, variables = traced
    self._names = [v.op.name for v in variables]
    ops = self._graph.get_operations()
    self._handles = {v.handle.name: v.op.name for v in variables}
    self._reads = [op for op in ops if op.type == 'ReadVariableOp']
    needed = _with_control(update)
    self._writes = [
      op
      for op in ops
      if op in needed
      and op.type != 'ReadVariableOp'
      and any(t.dtype == tf.resource for t in op.inputs)
    ]
    for op in self._writes:
      if op.type not in _WRITES:
        raise errors.UserError(
          f'Optimizer {p.name} updates by {op.type}, which the spmd engine '
          f'does not know: it knows {", ".join(_WRITES)} (SGD, Momentum, '
          'Adam and RMSProp). Use one of these, or engine=mpmd.'
        )
    # Of the weight itself there is no slot.
    names = self._names[1:]
    self.slots = [
      n.removeprefix('weight/') for n in names if n.startswith('weight/')
    ]
    self.shared = [n for n in names if not n.startswith('weight/')]

  def __call__(
    self,
    weight: tf.Tensor,
    slots: Sequence[tf.Tensor],
    shared: Sequence[tf.Tensor],
    gradient: tf.Tensor,
    learning_rate: tf.Tensor,
  ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Returns the new weight, slots and shared variables."""
    values = {'weight': weight}
    values.update(
      (f'weight/{n}', v) for n, v in zip(self.slots, slots, strict=True)
    )
    values.update(zip(self.shared, shared, strict=True))
    known = {self._gradient.name: gradient, self._rate.name: learning_rate}
    for op in self._reads:
      known[op.outputs[0].name] = values[self._handles[op.inputs[0].name]]
    wanted = [
      t for op in self._writes for t in op.inputs if t.dtype != tf.resource
    ]
    known.update(_compute(self._graph, wanted, known))
    old = dict(values)
    for op in self._writes:
      handles = [
        self._handles[t.name] for t in op.inputs if t.dtype == tf.resource
      ]
      terms = [known[t.name] for t in op.inputs if t.dtype != tf.resource]
      new = _WRITES[op.type](op, [old[h] for h in handles], terms)
      values.update(zip(handles, new, strict=False))
    return (
      values['weight'],
      [values[f'weight/{n}'] for n in self.slots],
      [values[n] for n in self.shared],
    )


def _trace(p, spec):
  with tf.Graph().as_default() as graph:
    gradient = tf.compat.v1.placeholder(spec.dtype, spec.shape)
    rate = tf.compat.v1.placeholder(tf.float32, [])
    variables = []

    def note(creator, **kwargs):
      variables.append(creator(**kwargs))
      return variables[-1]

    with tf.variable_creator_scope(note):
      weight = tf.compat.v1.get_variable(
        'weight', spec.shape, spec.dtype, use_resource=True
      )
      p = p.Copy().Set(add_summary_in_apply=False, clear_variable_scope=True)
      update = p.Instantiate().Apply(
        lambda: rate, py_utils.NestedMap(w=py_utils.VarGrad(weight, gradient))
      )
    return graph, gradient, rate, update, variables


def _with_control(op):
  """Returns all ops that run before an op, and itself."""
  found, pending = {op}, [op]
  while pending:
    op = pending.pop()
    before = {t.op for t in op.inputs} | set(op.control_inputs)
    pending += before - found
    found |= before
  return found


def _compute(graph, wanted, known):
  """Returns the values of tensors of `graph` by name, given those of others."""
  wanted = [t for t in wanted if t.name not in known]
  ops, taken = graph_walk.walk_back(wanted, known)
  names = {op.name for op in ops}
  part = tf.compat.v1.GraphDef(versions=graph.as_graph_def().versions)
  for node in graph.as_graph_def().node:
    if node.name in names:
      copy = part.node.add()
      copy.CopyFrom(node)
      copy.attr.pop('_class', None)
      inputs = [name for name in node.input if not name.startswith('^')]
      del copy.input[:]
      copy.input.extend(inputs)
  results = tf.graph_util.import_graph_def(
    part,
    {name: tf.identity(known[name]) for name in taken},
    [t.name for t in wanted],
    name='update',
  )
  return {t.name: r for t, r in zip(wanted, results or [], strict=True)}


def _assign(op, old, terms):
  del op, old
  return terms


def _assign_add(op, old, terms):
  del op
  return [old[0] + terms[0]]


def _assign_sub(op, old, terms):
  del op
  return [old[0] - terms[0]]


def _gradient_descent(op, old, terms):
  del op
  rate, gradient = terms
  return [old[0] - rate * gradient]


def _momentum(op, old, terms):
  weight, sums = old
  rate, gradient, momentum = terms
  sums = sums * momentum + gradient
  if op.get_attr('use_nesterov'):
    return [weight - rate * (gradient + momentum * sums), sums]
  return [weight - rate * sums, sums]


def _adam(op, old, terms):
  weight, m, v = old
  power1, power2, rate, beta1, beta2, epsilon, gradient = terms
  rate = rate * tf.sqrt(1.0 - power2) / (1.0 - power1)
  m = m + (gradient - m) * (1.0 - beta1)
  v = v + (gradient * gradient - v) * (1.0 - beta2)
  if op.get_attr('use_nesterov'):
    m_ahead = m * beta1 + (1.0 - beta1) * gradient
    return [weight - rate * m_ahead / (tf.sqrt(v) + epsilon), m, v]
  return [weight - rate * m / (tf.sqrt(v) + epsilon), m, v]


def _rms_prop(op, old, terms):
  del op
  weight, squares, moment = old
  rate, rho, momentum, epsilon, gradient = terms
  squares = squares + (gradient * gradient - squares) * (1.0 - rho)
  moment = momentum * moment + rate * gradient * tf.math.rsqrt(
    squares + epsilon
  )
  return [weight - moment, squares, moment]


# What TensorFlow's ops that write to variables compute: of the old values of
# their variables and of further terms, the new values.
_WRITES = {
  'AssignVariableOp': _assign,
  'AssignAddVariableOp': _assign_add,
  'AssignSubVariableOp': _assign_sub,
  'ResourceApplyGradientDescent': _gradient_descent,
  'ResourceApplyMomentum': _momentum,
  'ResourceApplyAdam': _adam,
  'ResourceApplyRMSProp': _rms_prop,
}
