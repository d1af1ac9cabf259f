"""Tensors go straight from their maker to their users."""

import tensorflow as tf

from lingvo_gpipe import cost
from lingvo_gpipe.plan import wiring

_X = tf.TensorSpec([2, 3], tf.float32)
_ID = tf.TensorSpec([2], tf.int32)


def _trace(used, passed, *outputs):
  return cost.LayerTrace(
    kind='Layer',
    num_params=0,
    param_bytes=0,
    trained_bytes=0,
    weights=(),
    fprop_flops=0,
    backward=None,
    used_inputs=used,
    outputs=outputs,
    passed_inputs=passed,
  )


def _network():
  """Ids 0 and 1 come in; layers make 2, 3 and 4; 2 skips over layer 1.

  l0: (0, 1) -> (2, 1)    l1: (2, 1) -> (3, 2)    l2: (3, 2, labels) -> 5
  """
  builder = wiring.WiringBuilder((_X, _ID))
  builder.add(_trace((True, True), (None, 1), _X, _ID))
  builder.add(_trace((False, True), (None, 0), _X, _X))
  builder.bring_in((_ID,))
  builder.add(_trace((True, True, True), (None,), _X))
  return builder.build()


def test_values_have_one_maker():
  network = _network()
  assert network.inputs == (0, 1, 4)
  assert [v.maker for v in network.values] == [-1, -1, 0, 1, -1, 2]
  assert [layer.args for layer in network.layers] == [
    (0, 1),
    (2, 1),
    (3, 2, 4),
  ]
  assert network.outputs == (5,)


def test_stages_exchange_only_what_is_used():
  network = _network()
  first, middle, last = (network.stage(range(l, l + 1)) for l in range(3))
  assert first.gives == (2,)
  # Layer 1 hands value 2 on without looking at it: it never goes there.
  assert middle.takes == (1,)
  assert middle.gives == (3,)
  assert middle.relays == ()
  assert last.takes == (2, 3, 4)
  assert last.gives == (5,)
  assert first.awaits == (2,)
  assert last.awaits == ()


def test_gradients_are_relayed_from_the_last_user_back():
  builder = wiring.WiringBuilder((_X,))
  builder.add(_trace((True,), (None,), _X))
  for _ in range(2):  # Each computes with value 1 and hands it on.
    builder.add(_trace((True,), (0, None), _X, _X))
    builder.add(_trace((True, True), (0,), _X))
  network = builder.build()
  middle = network.stage(range(1, 3))
  assert middle.takes == (1,)
  assert middle.relays == (1,)
  assert middle.awaits == (1,)
  assert network.stage(range(3, 5)).relays == ()
