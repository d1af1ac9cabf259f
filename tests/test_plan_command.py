"""`python -m lingvo_gpipe.plan` as its users run it: in a fresh process."""

import json
import subprocess
import sys

import pytest

_MODEL = '--model=lm.byte_lm.Tiny'


def _run(*arguments):
  done = subprocess.run(
    [sys.executable, '-m', 'lingvo_gpipe.plan', _MODEL, *arguments],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


def test_shows_and_writes_a_plan_with_everything_left_open(tmp_path):
  path, picture = tmp_path / 'plan.json', tmp_path / 'plan.png'
  status, shown, errors = _run(
    *(f'--{f}=auto' for f in ('num_stages', 'schedule', 'remat')),
    '--num_micro_batches=8',
    '--num_devices=4',
    '--device_memory=60MB',
    f'--output={path}',
    f'--output={picture}',
  )
  assert (status, errors) == (0, '')
  assert 'left free' in shown
  assert picture.stat().st_size > 10_000
  plan = json.loads(path.read_text())
  layers = [name for stage in plan['stages'] for name in stage['layers']]
  assert len(layers) == len(set(layers)) == 11
  assert max(plan['device_bytes']) <= 60e6
  assert plan['parameters'] == 1_664_512


def test_a_profile_is_measured_once_and_planned_from(tmp_path):
  path = tmp_path / 'profile.json'
  arguments = f'--profile={path}', '--num_stages=2', '--num_micro_batches=8'
  status, shown, _ = _run(*arguments)
  assert status == 0
  assert 'as measured' in shown
  written = path.read_text()
  # The embedding, equal blocks, the norm, the loss.
  assert len(json.loads(written)['layers']) == 4
  assert _run(*arguments) == (0, shown, '')
  assert path.read_text() == written


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--num_stages=99', 'only 11 layers: set num_stages to 11 or less'),
    ('--num_stages=few', '--num_stages=few: give a number, or auto'),
    ('--remat=some', "remat='some': choose one of"),
    ('--remat=budget', 'set device_memory, such as 16GiB'),
    ('--device_memory=much', "device_memory='much': give bytes"),
    ('--device_memory=1MB', 'No plan fits into device_memory'),
    ('--device_speeds=1,0', "device_speeds='1,0': give a positive number"),
    ('--output=plan.doc', '--output=plan.doc: choose .json'),
  ],
)
def test_a_mistake_is_one_line(argument, message):
  status, shown, errors = _run(argument)
  assert (status, shown) == (2, '')
  assert errors.startswith('error: ')
  assert message in errors
  assert errors.count('\n') == 1
