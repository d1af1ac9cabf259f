"""Weights that layers on different stages share."""

import functools

import numpy as np
import pytest
import small_models
import tensorflow as tf
from helpers import (
  forward_backward,
  losses,
  make_task,
  plain_losses,
  relative_difference,
)

from lingvo_gpipe import errors
from lingvo_gpipe import plan as plan_lib

_PAIRS = [('softmax/w', 'embedding/table'), ('block_005', 'block_000')]


class Tied(small_models.Micro):
  """Its table predicts, too, and its last block is its first."""

  def Task(self):
    p = super().Task()
    p.pipeline.loss_tpl.like_table = True
    p.pipeline.tied_weights = _PAIRS
    return p


@functools.cache
def _losses_of_one_stage():
  return losses(Tied, 4, num_stages=1)


@pytest.mark.parametrize('schedule, stages', [('1f1b', 3), ('zb1p', 4)])
def test_losses_do_not_depend_on_the_cut(schedule, stages):
  found = losses(Tied, 4, num_stages=stages, schedule=schedule)
  assert found == _losses_of_one_stage()


def test_losses_are_those_of_a_plain_loop():
  plain = plain_losses(Tied, 4)
  assert np.all(relative_difference(_losses_of_one_stage(), plain) < 1e-5)


def test_there_is_one_variable_with_one_set_of_slots():
  task = make_task(Tied, num_stages=4)
  names = task.CreateSlots()
  assert task.pipeline.vars.softmax.w is task.pipeline.vars.embedding.table
  assert not [n for n in names if 'softmax/w' in n or 'block_005' in n]
  assert [n for n in names if 'embedding/table' in n]


def test_the_gradient_is_the_sum_and_goes_to_the_first_layer():
  task = make_task(Tied, num_stages=2)
  batch = next(iter(task.input.datasource.GetDataset()))
  _, tied = forward_backward(task, batch)
  task.pipeline.params.tied_weights = ()
  _, apart = forward_backward(task, batch)
  assert tied.softmax.w is None
  expected = apart.softmax.w + apart.embedding.table
  np.testing.assert_array_equal(tied.embedding.table, expected)


def test_the_plan_counts_a_tied_weight_once():
  plan = make_task(Tied, num_stages=4).Plan()
  apart = make_task(small_models.Micro, num_stages=4).Plan()
  saved = sum(t.num_params for t in apart.traces)
  saved -= sum(t.num_params for t in plan.traces)
  table, block = 256 * 16, apart.traces[1].num_params
  assert saved == table + block
  slots = [
    sum(
      s.bytes['slots'] for s in plan_lib.predict(p, plan_lib.Machine()).stages
    )
    for p in (apart, plan)
  ]
  assert slots[0] - slots[1] == 2 * 4 * saved  # Two float32 slots of Adam.


@pytest.mark.parametrize(
  'pair, message',
  [
    (('softmax', 'encoder'), 'names no layer: there are embedding, block_000'),
    (('embedding/table', 'softmax/w'), 'name the later layer first'),
    (('softmax/v', 'embedding/table'), 'layer softmax has no such weight'),
    (('softmax/w', 'embedding/v'), 'there is no weight embedding/v'),
    (('softmax/b', 'embedding/table'), r'has shape \[256\], embedding/table'),
    (('softmax/w',), 'give pairs'),
  ],
)
def test_mistakes_are_explained(pair, message):
  with tf.Graph().as_default(), pytest.raises(errors.UserError, match=message):
    make_task(small_models.Micro, num_stages=1, tied_weights=[pair])
