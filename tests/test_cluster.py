"""Runs on worker processes: same numbers, and real faults on real processes."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import addresses, health, local
from lingvo_gpipe.trainer import checkpoints

_HERE = pathlib.Path(__file__).parent
_STEPS = 30


def _command(logdir, *args):
  # One core for everybody: the bits of a sum depend on how many share it.
  return [
    *('taskset', '-c', '0'),
    *(sys.executable, '-m', 'lingvo_gpipe.trainer'),
    '--model=small_models.Micro',
    f'--logdir={logdir}',
    '--num_stages=2',
    '--num_micro_batches=2',
    '--job=trainer',
    '--seed=3',
    f'--max_steps={_STEPS}',
    '--checkpoint_every=5',
    *args,
  ]


def _start(logdir, *args):
  return subprocess.Popen(
    _command(logdir, *args),
    env={**os.environ, 'PYTHONPATH': str(_HERE)},
    stderr=subprocess.PIPE,
    text=True,
  )


def _losses(logdir):
  with open(logdir / 'metrics.jsonl', encoding='utf-8') as file:
    return [json.loads(line)['loss'] for line in file]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The losses of the same run in one process."""
  logdir = tmp_path_factory.mktemp('undisturbed')
  process = _start(logdir)
  assert process.wait() == 0
  return _losses(logdir)


def _children(pid, marker):
  """Returns the process ids of children with `marker` in their command."""
  path = f'/proc/{pid}/task/{pid}/children'
  found = []
  for child in pathlib.Path(path).read_text(encoding='ascii').split():
    command = pathlib.Path(f'/proc/{child}/cmdline').read_bytes().decode()
    if marker in command:
      found.append(int(child))
  return found


def _wait_for_steps(logdir, count):
  path = logdir / 'metrics.jsonl'
  deadline = time.monotonic() + 120
  while time.monotonic() < deadline:
    if path.exists() and len(path.read_text(encoding='utf-8').split('\n')) > (
      count
    ):
      return
    time.sleep(0.02)
  raise AssertionError('no steps')


def _disturb(logdir, victim, how):
  """Runs on two workers, sends a signal to one process, returns stderr."""
  process = _start(logdir, '--local_workers=2')
  _wait_for_steps(logdir, 8)
  workers = _children(process.pid, f'--task={victim}')
  [chief] = _children(process.pid, '--chief_of')
  os.kill(chief if victim == 'chief' else workers[0], how)
  _, written = process.communicate(timeout=240)
  assert process.returncode == 0, written
  return written


def test_a_killed_worker_is_named_and_replaced(tmp_path, undisturbed):
  written = _disturb(tmp_path, 1, signal.SIGKILL)
  assert 'worker 1' in written
  assert 'SIGKILL' in written
  assert _losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_frozen_worker_is_named_and_replaced(tmp_path, undisturbed):
  written = _disturb(tmp_path, 0, signal.SIGSTOP)
  assert 'worker 0' in written
  assert 'has not answered for 20 seconds' in written
  assert _losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_killed_chief_is_replaced(tmp_path, undisturbed):
  written = _disturb(tmp_path, 'chief', signal.SIGKILL)
  assert 'status -9' in written
  assert _losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_worker_that_stays_away_is_done_without(tmp_path, undisturbed):
  found = addresses.free_local(2)
  workers = [
    subprocess.Popen(
      [
        *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=worker'),
        *(f'--task={task}', f'--workers={",".join(found)}'),
      ],
      stderr=subprocess.DEVNULL,
    )
    for task in range(2)
  ]
  try:
    process = _start(
      tmp_path,
      f'--workers={",".join(found)}',
      '--on_worker_loss=replan',
      '--worker_wait=40',
    )
    _wait_for_steps(tmp_path, 8)
    workers[1].kill()
    _, written = process.communicate(timeout=400)
  finally:
    for worker in workers:
      worker.kill()
  assert process.returncode == 0, written
  assert 'Going on with 1 workers and a new plan' in written
  assert _losses(tmp_path) == undisturbed


def test_sigterm_saves_and_ends_all_processes(tmp_path, undisturbed):
  process = _start(tmp_path, '--local_workers=2')
  _wait_for_steps(tmp_path, 3)
  workers = _children(process.pid, '--job=worker')
  process.terminate()
  _, written = process.communicate(timeout=60)
  assert process.returncode == 0, written
  found = _losses(tmp_path)
  assert checkpoints.step_of(checkpoints.latest(str(tmp_path))) == len(found)
  assert found == undisturbed[: len(found)]
  assert len(workers) == 2
  assert not [w for w in workers if os.path.exists(f'/proc/{w}')]
  # It goes on in one process and with other stages.
  assert _start(tmp_path, '--num_stages=3').wait() == 0
  assert _losses(tmp_path) == undisturbed


@pytest.mark.parametrize('suffix', ['.data-00000-of-00001', '.index'])
def test_a_damaged_checkpoint_is_skipped(tmp_path, undisturbed, suffix):
  assert _start(tmp_path, '--max_steps=20').wait() == 0
  path = checkpoints.latest(str(tmp_path)) + suffix
  os.truncate(path, os.path.getsize(path) // 2)
  process = _start(tmp_path)
  _, written = process.communicate()
  assert process.returncode == 0, written
  assert 'ckpt-20 is damaged' in written
  assert 'resuming from' in written and 'ckpt-15' in written
  assert _losses(tmp_path) == undisturbed


def _mistake(tmp_path, *args):
  """Returns what a run says that cannot begin."""
  started = time.monotonic()
  process = _start(tmp_path / 'run', *args)
  _, written = process.communicate(timeout=120)
  assert process.returncode == 2, written
  assert time.monotonic() - started < 90
  assert 'Traceback' not in written
  [line] = [l for l in written.splitlines() if l.startswith('error:')]
  return line


def test_an_address_that_does_not_answer(tmp_path):
  [address] = addresses.free_local(1)
  line = _mistake(tmp_path, f'--workers={address}', '--worker_wait=3')
  assert f'worker 0 at {address} does not answer after 3 seconds' in line


def test_fewer_devices_than_stages(tmp_path):
  line = _mistake(tmp_path, '--local_workers=1')
  assert 'num_stages=2, but' in line and '1 CPU device' in line


def _serve(task, of, job=None):
  """Starts a server that a trainer may take for a worker."""
  code = (
    'import tensorflow as tf, time\n'
    f'job = {job or addresses.job_name()!r}\n'
    f'tf.distribute.Server({{job: {of!r}}}, job, {task}, "grpc")\n'
    'time.sleep(300)\n'
  )
  return subprocess.Popen(
    [sys.executable, '-c', code], stderr=subprocess.DEVNULL
  )


_PRINT_DEVICES = """
import sys
from lingvo_gpipe import runtime
from lingvo_gpipe.cluster import chief
chief.connect(dict(enumerate(sys.argv[1:])), 60)
runtime.configure()
import helpers, small_models
task = helpers.make_task(small_models.Micro, num_stages=2)
for name, variable in task.CreateSlots().items():
  print(variable.device.split('/')[1:4:2], name)
"""


def test_workers_hold_all_but_the_step():
  found = addresses.free_local(2)
  workers = local.LocalWorkers(
    lambda task: [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=worker'),
      *(f'--task={task}', f'--workers={",".join(found)}'),
    ],
    2,
  )
  workers.start()
  try:
    printed = subprocess.run(
      [sys.executable, '-c', _PRINT_DEVICES, *found],
      env={**os.environ, 'PYTHONPATH': str(_HERE)},
      check=True,
      capture_output=True,
      text=True,
    ).stdout
  finally:
    workers.stop()
  lines = printed.splitlines()
  assert [l for l in lines if 'chief' in l] == [
    "['job:chief', 'task:0'] global_step:0"
  ]
  for task in range(2):
    job = f"['job:{addresses.job_name()}', 'task:{task}']"
    assert [l for l in lines if l.startswith(job) and 'Adam' in l]


def test_workers_of_other_versions_or_numbers_are_named():
  first, second = addresses.free_local(2)
  old = _serve(0, [first], job='gpipe_0_0_1_tf_2_1_0')
  double = _serve(0, [second, first])
  try:
    with pytest.raises(errors.UserError, match="is 'gpipe_0_0_1_tf_2_1_0'"):
      health.wait_for_all({0: first}, 60)
    with pytest.raises(errors.UserError, match='was started as task 0, but'):
      health.wait_for_all({1: second}, 60)
  finally:
    old.kill()
    double.kill()


def test_a_task_that_runs_twice_and_one_that_does_not_exist(tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    here = f'--workers=127.0.0.1:{port}'
    line = _mistake(tmp_path, '--job=worker', '--task=0', here)
    assert f'cannot listen at port {port}' in line
  line = _mistake(tmp_path, '--job=worker', '--task=1', '--workers=a:1')
  assert '--task=1, but there are 1 workers' in line


@pytest.mark.parametrize(
  'text, message',
  [
    (['host'], '"host" is no address'),
    (['a:1', 'a:1'], 'a:1 twice'),
    (['a:99999'], 'is no address'),
  ],
)
def test_wrong_addresses_are_explained(text, message):
  with pytest.raises(errors.UserError, match=message):
    addresses.parse(text)


def test_tf_config_names_the_workers(monkeypatch):
  cluster = {'worker': ['a:1', 'b:2'], 'chief': ['c:3']}
  task = {'type': 'worker', 'index': 1}
  config = json.dumps({'cluster': cluster, 'task': task})
  monkeypatch.setenv('TF_CONFIG', config)
  assert addresses.resolve('tf_config') == ['a:1', 'b:2']
  assert addresses.task_of('tf_config') == 1


def test_slurm_names_the_workers(monkeypatch):
  for name, value in (
    ('PROCID', '1'),
    ('STEP_NUM_TASKS', '2'),
    ('STEP_NODELIST', 'node[1-2]'),
    ('STEP_TASKS_PER_NODE', '1(x2)'),
  ):
    monkeypatch.setenv(f'SLURM_{name}', value)
  assert addresses.resolve('slurm') == ['node1:8888', 'node2:8888']
  assert addresses.task_of('slurm') == 1


@pytest.mark.parametrize('resolver', addresses.RESOLVERS)
def test_resolvers_out_of_place_tell_what_they_need(resolver, monkeypatch):
  monkeypatch.delenv('TF_CONFIG', raising=False)
  with pytest.raises(errors.UserError, match=f'--cluster_resolver={resolver}'):
    addresses.resolve(resolver)


def test_every_worker_has_a_core():
  cores = os.sched_getaffinity(0)
  for count in (1, 2, 3, 5):
    shares = local.shares_of_cores(count)
    assert len(shares) == count
    assert set().union(*shares) == cores
    assert all(shares)
