"""The spmd engine gives the losses of the mpmd engine, on XLA's CPU client."""

import numpy as np
import pytest
import small_models
import spmd_runs
import tensorflow as tf
from lingvo_gpipe.params.image import amoebanet

from lingvo_gpipe.engine.spmd import core, rooms

_STEPS = 10


class Eight(small_models.Micro):
  """8 blocks with dropout."""

  NUM_BLOCKS = 8
  NUM_MICRO_BATCHES = 8


class Images(amoebanet.AmoebaNetD):
  """Cells that all differ."""

  NUM_LAYERS = 3
  NUM_FILTERS = 16
  IMAGE_SIZE = 32
  NUM_CLASSES = 10
  BATCH_SIZE = 8
  NUM_MICRO_BATCHES = 4


def _fields(K, V=1, R=1, remat='full'):
  return {
    'num_stages': K * V,
    'num_replicas': R,
    'schedule': 'interleaved' if V > 1 else 'gpipe',
    'virtual_stages': V if V > 1 else None,
    'remat': remat,
  }


def _check_equal(model, **fields):
  """Compares losses, first gradients and the state at the end."""
  start, losses, after_one, end = spmd_runs.mpmd_run(model, _STEPS)
  found, found_after_one, found_end = spmd_runs.spmd_run(
    model, _STEPS, start, **fields
  )
  np.testing.assert_allclose(found[0], losses[0], rtol=1e-5)
  np.testing.assert_allclose(found, losses, rtol=1e-4)
  difference = spmd_runs.gradient_difference(after_one, found_after_one)
  assert difference < 1e-4
  assert found_end.keys() == end.keys()
  for name in end:
    np.testing.assert_allclose(
      found_end[name], end[name], atol=1e-4, err_msg=name
    )


@pytest.mark.parametrize(
  'K, V, R, remat',
  [(4, 1, 1, 'full'), (2, 2, 1, 'none'), (2, 1, 2, 'revolve:2')],
)
def test_equal_stages(K, V, R, remat):
  _check_equal(Eight, **_fields(K, V, R, remat))


@pytest.mark.slow
@pytest.mark.parametrize(
  'K, V, R, remat',
  [
    (1, 1, 1, 'full'),
    (2, 1, 1, 'none'),
    (8, 1, 1, 'full'),
    (4, 2, 1, 'none'),
    (2, 2, 2, 'full'),
    (4, 1, 2, 'full'),
    (4, 2, 2, 'full'),
    (2, 1, 4, 'full'),
    (2, 4, 1, 'full'),
  ],
)
def test_more_equal_stages(K, V, R, remat):
  _check_equal(Eight, **_fields(K, V, R, remat))


class Tied(Eight):
  """Its table predicts, too."""

  def Task(self):
    p = super().Task()
    p.pipeline.loss_tpl.like_table = True
    p.pipeline.tied_weights = [('softmax/w', 'embedding/table')]
    return p


def test_tied_weights():
  _check_equal(Tied, **_fields(2))


def test_stages_that_differ():
  # 6 blocks do not divide into 4 stages; the first takes the tokens.
  _check_equal(small_models.Micro, **_fields(4, R=2))


@pytest.mark.slow
@pytest.mark.parametrize('R', [1, 2])
def test_cells_that_differ(R):
  _check_equal(Images, **_fields(4, R=R))


def test_what_is_in_bubbles_does_not_matter(monkeypatch):
  """Fills all that a bubble's tick takes, and all that it gives, with NaN."""
  start, losses, _, end = spmd_runs.mpmd_run(Eight, 3)

  def not_a_number(tensors):
    return [
      tf.fill(t.shape, tf.constant(np.nan, t.dtype))
      if t.dtype.is_floating
      else t
      for t in tensors
    ]

  no_flow = rooms.Rooms.no_flow
  monkeypatch.setattr(
    rooms.Rooms,
    'no_flow',
    lambda self, specs: not_a_number(no_flow(self, specs)),
  )
  empty = rooms.Rooms.empty
  monkeypatch.setattr(
    rooms.Rooms,
    'empty',
    lambda self: tuple(map(not_a_number, empty(self))),
  )
  for name in ('forward', 'backward'):
    original = getattr(core.Core, name)

    def poisoned(self, runs, *args, original=original):
      made, rest = original(self, runs, *args)
      bad = not_a_number(made)
      return [
        tf.where(runs, t, nan) for t, nan in zip(made, bad, strict=True)
      ], rest

    monkeypatch.setattr(core.Core, name, poisoned)
  found, _, found_end = spmd_runs.spmd_run(Eight, 3, start, **_fields(2, 2))
  np.testing.assert_allclose(found, losses, rtol=1e-5)
  for name in end:
    np.testing.assert_allclose(found_end[name], end[name], atol=1e-4)
