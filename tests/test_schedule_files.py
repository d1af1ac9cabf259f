"""Schedules as files, and the command that shows them."""

import json
import subprocess
import sys

import pytest
import schedule_cases

from lingvo_gpipe import errors, schedule
from lingvo_gpipe.schedule import text

_GOOD = (
  '# two stages\n\n0F0 0F1 0B0 0B1\n1F0, 1B0,, 1F1 1B1  # torch has commas\n'
)


def _read(tmp_path, content, num_stages=2, num_micro_batches=2):
  path = tmp_path / 'mine.txt'
  path.write_text(content)
  return text.read_file(str(path), num_stages, num_micro_batches)


def test_a_file_is_read(tmp_path):
  assert _read(tmp_path, _GOOD) == schedule.make('gpipe', 2, 2)


def test_text_and_back(tmp_path):
  for name, K, M, V in schedule_cases.random_cases(50):
    built = schedule.make(name, K, M, V)
    assert _read(tmp_path, text.to_text(built), K, M) == built


@pytest.mark.parametrize(
  'content, message',
  [
    (_GOOD.replace('0B0', '0X0'), 'line 3, "0X0": no such action; write stage'),
    (_GOOD.replace('0B0', 'B0'), 'line 3, "B0": no such action'),
    (
      _GOOD.replace('1F0, 1B0,, 1F1 1B1', ''),
      'last line 3: no device has stage 1',
    ),
    (
      _GOOD.replace('0F0 0F1 0B0', '0B0 0F0 0F1'),
      'line 3, "0B0": a circle of waits: 0B0 waits for 0F0, which comes later '
      'on the same device',
    ),
    (
      _GOOD.replace('0F1 ', '').replace(' 0B1', ''),
      'after "0B0": device 0 ends',
    ),
    (
      _GOOD.replace('0F1', '0F2'),
      '"0F2": 0F2 is of micro-batch 2, they go from',
    ),
    ('# nothing\n', 'has no actions'),
  ],
)
def test_mistakes_are_told_with_line_token_and_reason(
  tmp_path, content, message
):
  with pytest.raises(errors.UserError) as caught:
    _read(tmp_path, content)
  assert message in str(caught.value)


def test_another_number_of_micro_batches(tmp_path):
  with pytest.raises(errors.UserError, match='line 3, after "0B1": .* 0F2'):
    _read(tmp_path, _GOOD, num_micro_batches=3)
  with pytest.raises(errors.UserError, match='line 3, "0F1": .* from 0 to 0'):
    _read(tmp_path, _GOOD, num_micro_batches=1)


def test_no_file():
  with pytest.raises(errors.UserError, match='/none.txt: .*No such file'):
    text.read_file('/none.txt', 1, 1)


def _run(*args):
  return subprocess.run(
    [sys.executable, '-m', 'lingvo_gpipe.schedule', *args],
    capture_output=True,
    text=True,
  )


def test_the_command_prints_and_draws(tmp_path):
  outputs = [tmp_path / f'a.{suffix}' for suffix in ('png', 'json', 'txt')]
  done = _run(
    '--schedule=1f1b',
    '--num_stages=2',
    '--num_micro_batches=2',
    *[f'--output={path}' for path in outputs],
  )
  assert done.returncode == 0, done.stderr
  assert 'device 0  0F0 0F1  .   .  0B0 ---  .  0B1 ---\n' in done.stdout
  assert 'makespan     9\n' in done.stdout
  assert 'bubble       33.3% (fill 5.6%, drain 11.1%' in done.stdout
  assert 'peak held    2 1 micro-batches' in done.stdout
  picture, trace, written = outputs
  assert picture.read_bytes().startswith(b'\x89PNG')
  events = json.loads(trace.read_text())['traceEvents']
  [event] = [e for e in events if e['name'] == '1B0']
  assert (event['ph'], event['tid'], event['ts'], event['dur']) == (
    'X',
    1,
    2e6,
    2e6,
  )
  again = _run(
    f'--schedule_file={written}', '--num_stages=2', '--num_micro_batches=2'
  )
  assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-3]


@pytest.mark.parametrize(
  'args, message',
  [
    (['--schedule=zbv', '--num_stages=3'], 'set num_stages to 2 or 4'),
    (['--output=a.gif'], '--output=a.gif: choose .png'),
    (['--output=/none/a.png'], '/none/a.png: No such file'),
    (['--forward=0', '--backward=0'], 'All times are 0'),
    (['1f1b'], 'Unknown argument "1f1b"'),
  ],
)
def test_mistakes_take_a_line_each(args, message):
  done = _run(*args)
  assert done.returncode == 2
  assert message in done.stderr
  assert 'Traceback' not in done.stderr


def test_the_room_imports_no_tensorflow():
  code = (
    'import sys, lingvo_gpipe.schedule.__main__; '
    'sys.exit(any(m in sys.modules for m in ("tensorflow", "lingvo")))'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
