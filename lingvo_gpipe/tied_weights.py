"""Weights that layers share: one variable, wherever the layers are.

    tied_weights=[('softmax/w', 'embedding/table')]

    stage 0                                     stage 3
    embedding/table  -- value, once a step -->  softmax/w
                     <-- gradient, to be added --

Layers and weights have the names that `--mode=inspect_model` prints. A pair of
layers ties all of their weights: ('block_003', 'block_000'). The later one
comes first, as in "softmax/w is embedding/table".
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from lingvo_gpipe import errors


class TiedWeights:
  """Hands out the variables that are there already while layers are built."""

  def __init__(
    self, pairs: Sequence[tuple[str, str]], layers: Sequence[str]
  ) -> None:
    """Sets up for layers of these names, in their order.

    Raises:
      UserError: a pair names no layer, or a layer before the one it copies.
    """
    self._pairs = tuple(tuple(pair) for pair in pairs)
    self._made = {}
    self._unused = set(self._pairs)
    for pair in self._pairs:
      if len(pair) != 2:
        raise errors.UserError(
          f'tied_weights: {pair}: give pairs such as '
          "('softmax/w', 'embedding/table')."
        )
      places = [path.partition('/')[0] for path in pair]
      for place in places:
        if place not in layers:
          raise errors.UserError(
            f'tied_weights: {pair} names no layer: there are '
            f'{", ".join(layers)}.'
          )
      if layers.index(places[0]) <= layers.index(places[1]):
        raise errors.UserError(
          f'tied_weights: {pair}: name the later layer first, as in '
          "('softmax/w', 'embedding/table')."
        )

  @contextlib.contextmanager
  def building(self, layer: str) -> Iterator[None]:
    """Around the building of a layer."""

    def create(next_creator, **kwargs):
      path = _relative_path(kwargs['var_name'], layer)
      owner = owner_of(path, self._pairs)
      self._unused -= {
        p for p in self._pairs if _within(path, p[0]) is not None
      }
      if owner == path:
        self._made[path] = next_creator(**kwargs)
        return self._made[path]
      return self._look_up(path, owner, kwargs['shape'])

    with py_utils.VariableCreatorScope(create):
      yield

  def check_all_used(self) -> None:
    """Raises a UserError if a pair has named a weight that no layer has."""
    for pair in self._pairs:
      if pair in self._unused:
        raise errors.UserError(
          f'tied_weights: {pair}: layer {pair[0].partition("/")[0]} has no '
          'such weight; --mode=inspect_model prints all names.'
        )

  def _look_up(self, path, owner, shape):
    if owner not in self._made:
      raise errors.UserError(
        f'tied_weights: there is no weight {owner} for {path} to be; '
        '--mode=inspect_model prints all names.'
      )
    found = self._made[owner]
    if list(shape) != found.shape.as_list():
      raise errors.UserError(
        f'tied_weights: {path} has shape {list(shape)}, {owner} '
        f'{found.shape.as_list()}: they cannot be one weight.'
      )
    return found


def owner_of(path: str, pairs: Sequence[tuple[str, str]]) -> str:
  """Returns the path of the weight that this one is: its own if not tied."""
  for later, earlier in pairs:
    rest = _within(path, later)
    if rest is not None:
      return owner_of(earlier + rest, pairs)
  return path


def _relative_path(name: str, layer: str) -> str:
  """Returns a variable's name from its layer on, as in `block_000/w`."""
  rest = f'/{name}'.partition(f'/{layer}/')[2]
  return f'{layer}/{rest.removesuffix(":0").removesuffix("/var")}'


def sum_gradients(
  layers: Sequence[base_layer.BaseLayer],
  gradients: Sequence[py_utils.NestedMap],
) -> list[py_utils.NestedMap]:
  """Adds gradients of tied weights to those of their first layer.

  Args:
    layers: in their order.
    gradients: of each layer, like its theta.

  Returns:
    The same, with None where a weight is that of an earlier layer.
  """
  sums = {}
  for layer, of_layer in zip(layers, gradients, strict=True):
    for variable, gradient in zip(
      layer.vars.Flatten(), of_layer.Flatten(), strict=True
    ):
      sums.setdefault(variable.ref(), []).append(gradient)
  summed = []
  for layer, of_layer in zip(layers, gradients, strict=True):
    flat = []
    for variable in layer.vars.Flatten():
      parts = sums.pop(variable.ref(), [None])
      if len(parts) > 1 and parts[0] is not None:
        with tf.device(variable.device):
          parts = [tf.add_n(parts)]
      flat.append(parts[0])
    summed.append(of_layer.Pack(flat))
  return summed


def _within(path, prefix):
  """Returns what of a path follows the prefix, or None if it is elsewhere."""
  if path == prefix or path.startswith(prefix + '/'):
    return path[len(prefix) :]
  return None
