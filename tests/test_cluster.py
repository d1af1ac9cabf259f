"""Runs on worker processes: same numbers, and real faults on real processes."""

import contextlib
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
from lingvo_gpipe.cluster import addresses, chief, health, local, loopback
from lingvo_gpipe.trainer import checkpoints

_HERE = pathlib.Path(__file__).parent
sys.path.append(str(_HERE.parent / 'tools'))
import processes  # noqa: E402

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


@contextlib.contextmanager
def _ended(*started):
  """Ends processes that are still there when an assertion has failed.

  A supervisor's own children end with it.
  """
  try:
    yield
  finally:
    for process in started:
      if process.poll() is None:
        process.kill()
        process.wait()


_losses = processes.losses


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The losses of the same run in one process."""
  logdir = tmp_path_factory.mktemp('undisturbed')
  process = _start(logdir)
  with _ended(process):
    assert process.wait(240) == 0
  return _losses(logdir)


def _wait_for_steps(logdir, count):
  deadline = time.monotonic() + 120
  while len(_losses(logdir)) < count:
    assert time.monotonic() < deadline
    time.sleep(0.02)


def _disturb(logdir, victim, how):
  """Runs on two workers, sends a signal to one process, returns stderr."""
  process = _start(logdir, '--local_workers=2')
  with _ended(process):
    _wait_for_steps(logdir, 8)
    workers = processes.children(process.pid, f'--task={victim}')
    [chief_pid] = processes.children(process.pid, '--chief_of')
    os.kill(chief_pid if victim == 'chief' else workers[0], how)
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
  assert 'SIGKILL' in written
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
  process = _start(
    tmp_path,
    f'--workers={",".join(found)}',
    '--on_worker_loss=replan',
    '--worker_wait=40',
  )
  with _ended(process, *workers):
    _wait_for_steps(tmp_path, 8)
    workers[1].kill()
    _, written = process.communicate(timeout=400)
  assert process.returncode == 0, written
  assert 'Going on with 1 workers and a new plan' in written
  assert 'num_stages: 1 in place of 2' in written
  assert _losses(tmp_path) == undisturbed


def test_sigterm_saves_and_ends_all_processes(tmp_path, undisturbed):
  process = _start(tmp_path, '--local_workers=2')
  with _ended(process):
    _wait_for_steps(tmp_path, 3)
    workers = processes.children(process.pid, '--job=worker')
    # Service managers send it to everybody.
    for pid in (*workers, process.pid):
      os.kill(pid, signal.SIGTERM)
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
  with _ended(process):
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


_CONNECT = """
import socket, sys
from tensorflow.python import pywrap_tfe
from lingvo_gpipe import runtime
from lingvo_gpipe.cluster import chief
real = pywrap_tfe.TFE_ContextSetServerDef
def set_server_def(handle, seconds, definition):
  print('forgotten after', seconds)
  real(handle, seconds, definition)
pywrap_tfe.TFE_ContextSetServerDef = set_server_def
port = int(sys.argv[1])
chief.connect(dict(enumerate(sys.argv[2:])), 60, port)
runtime.configure()
import helpers, small_models
task = helpers.make_task(small_models.Micro, num_stages=2)
for name, variable in task.CreateSlots().items():
  print(variable.device.split('/')[1:4:2], name)
with socket.socket(type=socket.SOCK_DGRAM) as probe:
  probe.connect(('192.0.2.1', 9))
  own = probe.getsockname()[0]
for host in (own, '127.0.0.1'):
  with socket.socket() as probe:
    probe.settimeout(2)
    print('answers at', host, probe.connect_ex((host, port)) == 0)
"""


def test_workers_hold_all_but_the_step():
  workers = local.LocalWorkers(
    lambda task, found: [
      *(sys.executable, '-m', 'lingvo_gpipe.trainer', '--job=worker'),
      *(f'--task={task}', f'--workers={",".join(found)}'),
    ],
    2,
  )
  found = workers.start()
  port = addresses.free_local(1)[0].rpartition(':')[2]
  try:
    printed = subprocess.run(
      [sys.executable, '-c', _CONNECT, port, *found],
      env={**os.environ, 'PYTHONPATH': str(_HERE)},
      check=True,
      capture_output=True,
      text=True,
    ).stdout
  finally:
    workers.stop()
    workers.remove_logs()
  lines = printed.splitlines()
  assert [l for l in lines if 'chief' in l] == [
    "['job:chief', 'task:0'] global_step:0"
  ]
  for task in range(2):
    job = f"['job:{addresses.job_name()}', 'task:{task}']"
    assert [l for l in lines if l.startswith(job) and 'Adam' in l]
  assert f'forgotten after {chief.FORGOTTEN_AFTER}' in lines
  # Other machines' packets would come from another address than loopback's.
  answers = dict(l.split()[2:] for l in lines if l.startswith('answers at'))
  assert answers.pop('127.0.0.1') == 'True'
  assert set(answers.values()) <= {'False'}


def test_a_port_without_a_listener_is_not_taken_for_a_closed_one():
  [address] = addresses.free_local(1)
  with pytest.raises(OSError, match='does not listen'):
    loopback.restrict(int(address.rpartition(':')[2]))


@pytest.mark.parametrize(
  'seen, host',
  [
    (['127.0.0.1', '10.0.0.1'], '10.0.0.1'),
    (['[::1]', '[fe80::1%eth0]'], '[fe80::1%eth0]'),
    (['127.0.1.1', '127.0.0.1'], '127.0.1.1'),
  ],
)
def test_workers_on_this_machine_do_not_hide_it_from_others(seen, host):
  assert chief.own_host(seen) == host


def test_workers_of_other_versions_or_numbers_are_named():
  first, second = addresses.free_local(2)
  old = _serve(0, [first], job='gpipe_0_0_1_tf_2_1_0')
  double = _serve(0, [second, first])
  with _ended(old, double):
    with pytest.raises(errors.UserError, match="is 'gpipe_0_0_1_tf_2_1_0'"):
      health.wait_for_all({0: first}, 60)
    with pytest.raises(errors.UserError, match='was started as task 0, but'):
      health.wait_for_all({1: second}, 60)


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
    ('SLURM_PROCID', '2'),
    ('SLURM_LOCALID', '0'),
    ('SLURM_STEP_NUM_TASKS', '4'),
    ('SLURM_STEP_NODELIST', 'node[2,10]'),
    ('SLURM_STEP_TASKS_PER_NODE', '2(x2)'),
    ('SLURMD_NODENAME', 'node10'),
  ):
    monkeypatch.setenv(name, value)
  found = addresses.resolve('slurm')
  assert sorted(found) == [
    'node10:8888',
    'node10:8889',
    'node2:8888',
    'node2:8889',
  ]
  assert found[addresses.task_of('slurm')] == 'node10:8888'


def test_kubernetes_names_the_workers(monkeypatch):
  monkeypatch.setenv('WORKER_SET', 'gpipe')
  monkeypatch.setenv('WORKER_COUNT', '2')
  monkeypatch.setenv('WORKER_PORT', '2222')
  monkeypatch.setenv('HOSTNAME', 'gpipe-1')
  found = addresses.resolve('kubernetes')
  assert found == ['gpipe-0.gpipe:2222', 'gpipe-1.gpipe:2222']
  assert addresses.task_of('kubernetes') == 1


@pytest.mark.parametrize('resolver', addresses.RESOLVERS)
def test_resolvers_out_of_place_tell_what_they_need(resolver, monkeypatch):
  monkeypatch.delenv('TF_CONFIG', raising=False)
  with pytest.raises(errors.UserError, match=f'--cluster_resolver={resolver}'):
    addresses.resolve(resolver)
  if resolver != 'tf_config':
    with pytest.raises(
      errors.UserError, match=f'--cluster_resolver={resolver}'
    ):
      addresses.task_of(resolver)


def test_every_worker_has_a_core():
  cores = os.sched_getaffinity(0)
  for count in (1, 2, 3, 5):
    shares = local.shares_of_cores(count)
    assert len(shares) == count
    assert set().union(*shares) == cores
    assert all(shares)
