"""The trainer binary: runs, stops, resumes, and tells mistakes in one line."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver
from lingvo.core import py_utils

from lingvo_gpipe import errors, pipelining_layer
from lingvo_gpipe.trainer import (
  checkpoints,
  evaluate,
  logdirs,
  main,
  replanning,
  reports,
)

_HERE = pathlib.Path(__file__).parent
_MODEL = 'small_models.Micro'


def _run(capsys, *args) -> tuple[int, str]:
  """Runs the binary's main in this process: (exit status, what it wrote)."""
  with flagsaver.flagsaver():
    remaining = flags.FLAGS(['trainer', *args])
    py_utils.GetGlobalStep().assign(0)
    status = main._main(remaining)
  written = capsys.readouterr()
  return status, written.out + written.err


def _train(capsys, logdir, *args, model=_MODEL, max_steps=3):
  return _run(
    capsys,
    f'--model={model}',
    f'--logdir={logdir}',
    f'--max_steps={max_steps}',
    *args,
  )


def _rows(logdir, name='metrics'):
  with open(logdir / f'{name}.jsonl', encoding='utf-8') as file:
    return [json.loads(line) for line in file]


@pytest.fixture(scope='module')
def straight_run(tmp_path_factory):
  """The losses of 8 undisturbed steps."""
  logdir = tmp_path_factory.mktemp('straight')
  subprocess.run(_command(logdir, 8), check=True, env=_environment())
  return [row['loss'] for row in _rows(logdir)]


def _environment():
  return {**os.environ, 'PYTHONPATH': str(_HERE)}


def _command(logdir, max_steps, *args):
  return [
    sys.executable,
    '-m',
    'lingvo_gpipe.trainer',
    f'--model={_MODEL}',
    f'--logdir={logdir}',
    f'--max_steps={max_steps}',
    '--job=trainer',
    '--seed=3',
    *args,
  ]


def test_a_run_leaves_everything_in_its_logdir(capsys, tmp_path):
  logdir = tmp_path / 'run'
  status, written = _train(capsys, logdir, '--num_stages=3')
  assert status == 0, written
  assert 'step 3/3' in written
  assert 'held-out loss' in written
  rows = _rows(logdir)
  assert [row['step'] for row in rows] == [1, 2, 3]
  for field in (
    'loss',
    'weight',
    'grad_norm',
    'learning_rate',
    'step_seconds',
    'tokens_per_second',
  ):
    assert all(isinstance(row[field], float) for row in rows), field
  # Windows at the ends of files are padded, and padding does not count.
  assert all(0 < row['weight'] <= 32 * 16 for row in rows)
  [held_out] = _rows(logdir, 'eval')
  assert held_out['step'] == 3
  assert held_out['bits_per_byte'] == pytest.approx(
    held_out['loss'] / 0.6931, rel=1e-3
  )
  plan = (logdir / 'plan.txt').read_text()
  assert 'stage 2 on' in plan
  assert 'block_005' in plan
  assert 'num_stages : 3' in (logdir / 'params.txt').read_text()
  assert tf.train.latest_checkpoint(str(logdir)).endswith('ckpt-3')
  assert list((logdir / 'metrics').glob('events*'))


@pytest.mark.parametrize('num_stages', [4, 2])
def test_a_stopped_run_goes_on_as_if_it_had_not(
  straight_run, tmp_path, num_stages
):
  """SIGTERM in mid-run; then on, with the same or another number of stages."""
  process = subprocess.Popen(
    _command(tmp_path, 1000),
    env=_environment(),
    stderr=subprocess.PIPE,
    text=True,
  )
  metrics = tmp_path / 'metrics.jsonl'
  deadline = time.monotonic() + 120
  while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
    assert time.monotonic() < deadline
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  _, written = process.communicate(timeout=60)
  assert process.returncode == 0, written
  stopped_at = len(_rows(tmp_path))
  if stopped_at >= 8:
    pytest.skip('the machine was too fast to stop it before the end')
  command = _command(tmp_path, 8, f'--num_stages={num_stages}')
  subprocess.run(command, check=True, env=_environment())
  rows = _rows(tmp_path)
  assert [row['step'] for row in rows] == list(range(1, 9))
  assert [row['loss'] for row in rows] == straight_run


def test_a_killed_run_goes_on_from_its_checkpoint(straight_run, tmp_path):
  command = _command(tmp_path, 1000, '--checkpoint_every=2')
  process = subprocess.Popen(
    command, env=_environment(), stderr=subprocess.DEVNULL
  )
  deadline = time.monotonic() + 120
  while not list(tmp_path.glob('ckpt-2.index')):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  process.kill()
  process.wait()
  # Rows that the killed run wrote after its checkpoint are written again.
  with open(tmp_path / 'metrics.jsonl', 'a', encoding='utf-8') as file:
    file.write('{"step": 99, "loss": 0.0}\n{"step": 100, "lo')
  restored = int(tf.train.latest_checkpoint(str(tmp_path)).rpartition('-')[2])
  last = max(8, restored)
  subprocess.run(_command(tmp_path, last), check=True, env=_environment())
  rows = _rows(tmp_path)
  assert [row['step'] for row in rows] == list(range(1, last + 1))
  assert [row['loss'] for row in rows][:8] == straight_run


def test_traced_steps_show_what_the_pipeline_did(
  straight_run, capsys, tmp_path
):
  status, written = _train(
    capsys,
    tmp_path,
    '--job=trainer',
    '--seed=3',
    '--trace_steps=2,4',
    '--schedule=zbv',
    '--num_stages=4',
    max_steps=5,
  )
  assert status == 0, written
  assert 'step 4: bubble ' in written
  rows = _rows(tmp_path)
  assert [row['loss'] for row in rows] == straight_run[:5]
  traced = [row['step'] for row in rows if 'bubble' in row]
  assert traced == [2, 4]
  row = rows[3]
  for field in ('bubble', 'recompute_share', 'transfer_wait', 'busy_stage_3'):
    assert 0 <= row[field] < 1, field
    assert 0 <= row[f'{field}_planned'] < 1, field
  assert row['pipeline_seconds'] > 0
  assert row['pipeline_seconds_simulated'] > 0
  for step in traced:
    picture = tmp_path / f'timeline-{step}.png'
    assert picture.read_bytes().startswith(b'\x89PNG')
    events = json.loads((tmp_path / f'timeline-{step}.json').read_text())
    names = [e['name'] for e in events['traceEvents']]
    assert names.count('0F0') == 2  # Measured and simulated.
  assert '2 devices' in (tmp_path / 'plan.txt').read_text()


def test_the_evaler_alone_evaluates_checkpoints(capsys, tmp_path):
  _train(capsys, tmp_path)
  before = _rows(tmp_path, 'eval')
  status, written = _train(capsys, tmp_path, '--job=evaler')
  assert status == 0, written
  # What was reported before stays, and the same weights give the same loss.
  first, second = _rows(tmp_path, 'eval')
  assert [first] == before
  assert first['step'] == second['step'] == 3
  assert first['loss'] == second['loss']


def test_a_finished_run_is_left_as_it_is(capsys, tmp_path):
  _train(capsys, tmp_path, '--job=trainer')
  before = _rows(tmp_path)
  status, _ = _train(capsys, tmp_path, '--job=trainer')
  assert status == 0
  assert _rows(tmp_path) == before


def test_lists_and_inspects(capsys):
  status, written = _run(capsys, '--list_models')
  assert status == 0
  assert {'lm.byte_lm.Small', 'lm.byte_lm.Tiny'} <= set(written.split())
  status, written = _run(capsys, f'--model={_MODEL}', '--mode=inspect_params')
  assert status == 0
  assert 'pipeline.num_micro_batches : 8' in written
  status, written = _run(
    capsys, f'--model={_MODEL}', '--mode=inspect_model', '--num_stages=2'
  )
  assert status == 0
  assert 'pipeline/block_003/qkv/var:0' in written
  assert 'stage 1 on' in written


def test_overrides_reach_the_params(capsys):
  status, written = _run(
    capsys,
    f'--model={_MODEL}',
    '--mode=inspect_params',
    '--num_micro_batches=5',
    '--remat=full',
    '--model_params_override=task.pipeline.num_stages:2;'
    'task.train.learning_rate:0.5;input.batch_size:7',
  )
  assert status == 0
  for line in (
    'pipeline.num_micro_batches : 5',
    "pipeline.remat : 'full'",
    'pipeline.num_stages : 2',
    'train.learning_rate : 0.5',
    'input.batch_size : 7',
  ):
    assert line in written


@pytest.mark.parametrize(
  'args, message',
  [
    ([], '--model is missing'),
    (['--model=lm.byte_lm.Tny'], 'Did you mean lm.byte_lm.Tiny'),
    (['--model=nothing'], 'no such model'),
    (['--model=small_models.NoInput'], 'define Train() in its class'),
    ([f'--model={_MODEL}'], '--logdir is missing'),
    ([f'--model={_MODEL}', '--job=tester'], '--job=tester'),
    ([f'--model={_MODEL}', 'stray'], 'Unknown argument "stray"'),
    (
      [f'--model={_MODEL}', '--logdir=/tmp', '--num_stages=99'],
      'num_stages to 9 or less',
    ),
    (
      [f'--model={_MODEL}', '--logdir=/tmp', '--num_micro_batches=33'],
      'only 32 examples',
    ),
    (
      [f'--model={_MODEL}', '--model_params_override=task.pipeline.remta:1'],
      'remta',
    ),
    (
      [f'--model={_MODEL}', '--model_params_override=input.file_pattern:/no/*'],
      'matches no file',
    ),
    (
      [f'--model={_MODEL}', '--schedule=zbv', '--num_stages=3'],
      'set num_stages to 2 or 4',
    ),
    (
      [f'--model={_MODEL}', '--schedule_file=/none.txt'],
      '--schedule_file=/none.txt',
    ),
    (
      [f'--model={_MODEL}', '--logdir=/tmp', '--trace_steps=first'],
      '--trace_steps=first: give steps from 1 on',
    ),
    ([f'--model={_MODEL}', '--logdir=/proc/nothing'], '--logdir=/proc/nothing'),
    (
      [f'--model={_MODEL}', '--logdir=/tmp', '--tpu=local'],
      '--tpu=local: no TPU answers (TPUs not found',
    ),
    (
      [f'--model={_MODEL}', '--logdir=/tmp', '--tpu=grpc://127.0.0.1:9'],
      '--tpu=grpc://127.0.0.1:9: no TPU answers ([Errno 111]',
    ),
    (
      [f'--model={_MODEL}', '--tpu=local', '--engine=mpmd'],
      'leave out --engine=mpmd',
    ),
  ],
)
def test_a_mistake_is_one_clear_line(capsys, args, message):
  status, written = _run(capsys, *args)
  assert status == 2
  lines = written.strip().splitlines()
  assert len(lines) == 1, written
  assert lines[0].startswith('error: ')
  assert message in lines[0]


def test_another_models_checkpoint_is_refused_and_left_alone(capsys, tmp_path):
  _train(capsys, tmp_path, '--job=trainer')
  before = {p: p.read_bytes() for p in tmp_path.glob('*') if p.is_file()}
  status, written = _train(capsys, tmp_path, model='small_models.Other')
  assert status == 2
  assert 'checkpoint of another model' in written
  after = {p: p.read_bytes() for p in tmp_path.glob('*') if p.is_file()}
  assert before == after


def test_a_folder_that_is_no_run_is_refused_and_left_alone(capsys, tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('mine')
  status, written = _train(capsys, tmp_path)
  assert status == 2
  assert 'holds metrics.jsonl but no checkpoint' in written
  assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']
  assert (tmp_path / 'metrics.jsonl').read_text() == 'mine'


def test_a_checkpoint_comes_before_all_else(capsys, tmp_path, monkeypatch):
  """So that a run killed at any instant leaves a folder it can go on from."""
  real_save = checkpoints.Checkpoints.save

  def save(self, step):
    if step == 0:
      assert [p.name for p in tmp_path.iterdir()] == ['.lock']
    return real_save(self, step)

  monkeypatch.setattr(checkpoints.Checkpoints, 'save', save)
  status, written = _train(capsys, tmp_path, '--job=trainer', max_steps=1)
  assert status == 0, written


def test_a_nan_skips_the_update(capsys, tmp_path, monkeypatch):
  """A batch whose gradients are not finite must leave the weights finite."""
  import small_models

  monkeypatch.setattr(small_models.Micro, 'LEARNING_RATE', 1e30)
  status, written = _train(capsys, tmp_path, '--job=trainer', max_steps=4)
  assert status == 0, written
  reader = tf.train.load_checkpoint(str(tmp_path))
  for key in reader.get_variable_to_shape_map():
    if 'VARIABLE_VALUE' in key:
      assert not tf.reduce_any(
        tf.math.is_nan(tf.cast(reader.get_tensor(key), tf.float32))
      )


def test_a_loss_of_another_name_trains_and_evaluates(capsys, tmp_path):
  status, written = _train(
    capsys, tmp_path, model='small_models.Renamed', max_steps=2
  )
  assert status == 0, written
  assert 'step 2/2, nll ' in written
  assert 'held-out nll ' in written
  [row] = _rows(tmp_path, 'eval')
  assert row['nll'] > 0 and row['weight'] > 0


def test_an_evaluation_that_was_missed_is_made_up_for(capsys, tmp_path):
  _train(capsys, tmp_path, '--job=trainer', '--checkpoint_every=2', max_steps=2)
  _train(capsys, tmp_path, '--checkpoint_every=2', max_steps=4)
  assert [row['step'] for row in _rows(tmp_path, 'eval')] == [2, 4]


def test_a_run_killed_in_its_first_save_begins_anew(capsys, tmp_path):
  (tmp_path / 'ckpt-0.index').write_bytes(b'cut sh')
  (tmp_path / 'ckpt-0_temp').mkdir()
  (tmp_path / 'ckpt-0_temp' / 'part-00000-of-00001.index').touch()
  status, written = _train(capsys, tmp_path, '--job=trainer', max_steps=1)
  assert status == 0, written
  assert [row['step'] for row in _rows(tmp_path)] == [1]
  assert not list(tmp_path.glob('*_temp'))
  # Once there are metrics, there is something to lose.
  for path in tmp_path.glob('ckpt-*.index'):
    path.write_bytes(b'cut sh')
  status, written = _train(capsys, tmp_path, '--job=trainer', max_steps=1)
  assert status == 2
  assert 'no checkpoint can be read' in written


def test_a_logdir_is_for_one_run_at_a_time(capsys, tmp_path):
  with logdirs.opened(str(tmp_path)):
    status, written = _train(capsys, tmp_path, '--job=trainer', max_steps=1)
  assert status == 2
  assert 'another run is writing there' in written


def test_what_is_not_finite_is_null_in_metrics(tmp_path):
  report = reports.MetricsFile(str(tmp_path), 'metrics', 0)
  report.write({'step': 1, 'a': float('inf'), 'b': float('nan'), 'c': 2.0})
  report.close()
  assert _rows(tmp_path) == [{'step': 1, 'a': None, 'b': None, 'c': 2.0}]


class _Restorer:
  """In place of Checkpoints: the first `damaged` restores fail."""

  def __init__(self, damaged):
    self._damaged = damaged

  def restore(self, path):
    self._damaged -= 1
    if self._damaged >= 0:
      raise checkpoints.Damaged(f'{path} is damaged')


def test_the_evaler_tries_a_checkpoint_in_the_making_again(tmp_path):
  (tmp_path / 'ckpt-5.index').touch()

  def follow(damaged):
    return list(
      evaluate.follow(
        _Restorer(damaged), str(tmp_path), 5, lambda: False, poll_seconds=0
      )
    )

  assert follow(damaged=2) == [5]
  with pytest.raises(errors.UserError, match='that of the last step'):
    follow(damaged=99)


@pytest.mark.parametrize(
  'error, is_damage',
  [
    (tf.errors.DataLossError(None, None, 'checksum'), True),
    (tf.errors.OpError(None, None, 'checksum', tf.errors.UNKNOWN), True),
    (tf.errors.UnavailableError(None, None, 'worker'), False),
    (tf.errors.ResourceExhaustedError(None, None, 'memory'), False),
  ],
)
def test_only_damage_is_taken_for_damage(
  tmp_path, monkeypatch, error, is_damage
):
  def fail(*unused):
    raise error

  monkeypatch.setattr(tf.train, 'load_checkpoint', fail)
  restorer = checkpoints.Checkpoints(str(tmp_path), {})
  with pytest.raises(checkpoints.Damaged if is_damage else type(error)):
    restorer.restore('ckpt-1')


@pytest.mark.parametrize(
  'fields, devices, expected',
  [
    ({'num_stages': 4}, 3, (3, 1)),
    ({'num_stages': 8, 'schedule': 'interleaved'}, 2, (4, 1)),
    ({'num_stages': 4, 'schedule': 'zbv'}, 1, (2, 1)),
    ({'num_stages': 2, 'num_replicas': 2}, 3, (1, 2)),
    ({'num_stages': 2, 'num_replicas': 2}, 1, (1, 1)),
    ({'num_stages': 4, 'schedule': 'auto'}, 3, (3, 1)),
    ({'num_stages': 'auto', 'num_replicas': 3}, 2, ('auto', 2)),
    ({'num_stages': 4}, 4, (4, 1)),
  ],
)
def test_fewer_workers_take_fewer_stages(fields, devices, expected):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    num_micro_batches=8, **fields
  )
  said = []
  replanning.fit(p, devices, said.append)
  assert (p.num_stages, p.num_replicas) == expected
  changed = fields['num_stages'] != p.num_stages
  assert any(line.startswith('num_stages') for line in said) == changed


@pytest.mark.parametrize(
  'fields',
  [
    {'device_speeds': '1,0.5'},
    {'device_memory': '1GiB,2GiB'},
    {'schedule_file': 'mine.txt'},
  ],
)
def test_what_is_for_so_many_devices_is_refused_with_replan(fields):
  p = pipelining_layer.PipeliningLayer.Params().Set(**fields)
  with pytest.raises(errors.UserError, match=next(iter(fields))):
    replanning.check(p)


def test_engines_take_over_from_each_other(capsys, tmp_path):
  hashed = '--random_bits=hash'
  assert _train(capsys, tmp_path / 'one', hashed, max_steps=6)[0] == 0
  other = tmp_path / 'other'
  for engine, max_steps in (('mpmd', 2), ('spmd', 4), ('mpmd', 6)):
    status, written = _train(
      capsys, other, hashed, f'--engine={engine}', max_steps=max_steps
    )
    assert status == 0, written
  losses = [row['loss'] for row in _rows(tmp_path / 'one')]
  assert [row['loss'] for row in _rows(other)] == pytest.approx(
    losses, rel=1e-5
  )
