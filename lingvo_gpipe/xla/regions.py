"""Marks the ops of regions, in which every core runs its own.

    whole tensor -> @SPMDFullToShardShape -> slice -> ops of a region -> slice
                                                                           |
                                    whole tensor <- @SPMDShardToFullShape <-

TensorFlow marks the borders alone, and XLA guesses the rest. It guesses wrong
where ops inside and outside share a constant: MLIR makes equal constants one,
and XLA takes it, and then all that it reaches, for a part of the region. So
constants go over the border, too.
"""

from jax._src.lib.mlir import ir

_ATTRIBUTE = 'mhlo.sharding'
_ENTERS, _LEAVES = 'SPMDFullToShardShape', 'SPMDShardToFullShape'
# Ops with bodies. What these take from outside becomes results of theirs on the
# way to XLA, and a mark would be one for too few.
_LOOPS = ('stablehlo.while', 'stablehlo.case', 'stablehlo.if')
_SOURCES = ('stablehlo.constant', 'stablehlo.iota')


def mark(module: ir.Module) -> None:
  """Marks the ops of all regions of a module."""
  _Marker().visit(module.operation)


class _Marker:
  """Follows values from op to op."""

  def __init__(self):
    # Results of ops of regions, and of ops that depend on nothing.
    self._inside, self._constant = set(), set()
    self._brought_in = {}

  def visit(self, operation, is_inside=False):
    """Marks what is inside of an operation."""
    for region in operation.regions:
      for block in region.blocks:
        self._visit_block(block, is_inside)

  def _visit_block(self, block, is_inside):
    for op in list(block.operations):
      op = op.operation
      if _is_call_of(op, _ENTERS):
        self._inside.update(op.results)
      elif _is_call_of(op, _LEAVES):
        pass
      elif self._is_constant(op):
        self._constant.update(op.results)
      elif is_inside or any(v in self._inside for v in op.operands):
        self._inside.update(op.results)
        self._bring_in_constants(op)
        if op.name in _LOOPS:
          self.visit(op, True)
          self._mark_results(op)
        elif op.results:
          marks = ', '.join(['{manual}'] * len(op.results))
          text = marks if len(op.results) == 1 else f'{{{marks}}}'
          op.attributes[_ATTRIBUTE] = ir.StringAttr.get(text)
      elif op.name in _LOOPS or op.name == 'func.func':
        self.visit(op)

  def _bring_in_constants(self, op):
    """Has constants come in over the border, each once."""
    for number, value in enumerate(op.operands):
      if value in self._constant:
        if value not in self._brought_in:
          outside = _call('Sharding', value, '{replicated}')
          self._brought_in[value] = _call(_ENTERS, outside, '{manual}')
        op.operands[number] = self._brought_in[value]

  def _mark_results(self, loop):
    """Marks what comes out of a loop, which itself cannot be."""
    for value in loop.results:
      marked = _call('Sharding', value, '{manual}')
      value.replace_all_uses_except(marked, marked.owner.operation)
      self._inside.add(marked)

  def _is_constant(self, op):
    if op.name in _SOURCES:
      return True
    return (
      op.name.startswith('stablehlo.')
      and op.name != 'stablehlo.custom_call'
      and len(op.operands) > 0
      and len(op.results) > 0
      and op.name not in _LOOPS
      and all(value in self._constant for value in op.operands)
    )


def _call(target, value, sharding):
  call = ir.Operation.create(
    'stablehlo.custom_call',
    results=[value.type],
    operands=[value],
    attributes={
      'call_target_name': ir.StringAttr.get(target),
      _ATTRIBUTE: ir.StringAttr.get(sharding),
    },
    ip=ir.InsertionPoint.after(value.owner),
    loc=ir.Location.unknown(),
  )
  return call.result


def _is_call_of(op, target):
  return (
    op.name == 'stablehlo.custom_call'
    and op.attributes['call_target_name'].value == target
  )
