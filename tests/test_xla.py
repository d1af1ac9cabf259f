"""The step compiles for TPUs that are not there."""

import pytest
import small_models
import spmd_runs
import tensorflow as tf
from lingvo_gpipe.params.image import amoebanet

from lingvo_gpipe import errors, xla
from lingvo_gpipe.engine import spmd


class Wide(small_models.Micro):
  """Large enough for the compiler to see matrices."""

  NUM_BLOCKS = 8
  MODEL_DIM = 128
  SEQUENCE_LENGTH = 128


def _compile(model, topology, **fields):
  p = spmd_runs.make_params(model, remat='full', **fields)
  p.fprop_dtype = tf.bfloat16
  spec = p.input.Instantiate().datasource.GetDataset().element_spec
  cores = xla.devices(topology)
  return xla.compile_for(xla.lower(spmd.build(p, spec)), cores), cores


@pytest.mark.parametrize(
  'topology, fields',
  [
    ('v5e:2x2', {'num_stages': 4}),
    pytest.param(
      'v6e:2x4',
      {'num_stages': 4, 'num_replicas': 2},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_neighbours_alone_talk_in_the_loops(topology, fields):
  report, cores = _compile(Wide, topology, **fields)
  assert report.fits
  assert 0 < report.peak < xla.memory(cores)
  assert report.collectives['collective-permute'] >= 2
  assert set(xla.in_ticks(report.text)) == {'collective-permute'}


@pytest.mark.slow
@pytest.mark.parametrize('topology', ['v5e:2x4', 'v4:2x2x1', 'v6e:2x2'])
def test_more_slices(topology):
  report, _ = _compile(Wide, topology, num_stages=4)
  assert report.fits
  assert set(xla.in_ticks(report.text)) == {'collective-permute'}


@pytest.mark.slow
def test_stages_that_differ():
  report, _ = _compile(
    amoebanet.AmoebaNetDMini, 'v5e:2x2', num_stages=4, num_micro_batches=4
  )
  assert report.fits
  assert set(xla.in_ticks(report.text)) == {'collective-permute'}


def test_collectives_are_found_where_they_are():
  text = """
%adds (a: f32[]) -> f32[] {
  %r = f32[] all-reduce(%a), to_apply=%sum
}
%inner (a: f32[]) -> f32[] {
  %c = f32[] fusion(%a), calls=%adds
}
%tick (a: f32[]) -> f32[] {
  %p = f32[] collective-permute(%a)
  %w = f32[] while(%p), condition=%c, body=%inner
}
%outer (a: f32[]) -> f32[] {
  %g = f32[] all-gather-start(%a)
}
ENTRY %main (a: f32[]) -> f32[] {
  %w = f32[] while(%a), condition=%c, body=%tick
  %v = f32[] while(%w), condition=%c, body=%outer
}
"""
  assert xla.in_ticks(text) == {'collective-permute': 1, 'all-reduce': 1}
  assert xla.collectives(text)['all-gather'] == 1


def test_slices_that_are_not():
  with pytest.raises(errors.UserError, match='v5e:9x9.*Examples: v5e:2x4'):
    xla.devices('v5e:9x9')
  with pytest.raises(errors.UserError, match='has 1 cores, 4 are needed'):
    _compile(small_models.Other, 'v5e:1x1', num_stages=4)
