"""What the supervisor makes of ends and losses, with no TensorFlow process."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import chief, health, local, parent, supervisor


class _Workers:
  """In place of local.LocalWorkers: `dying` starts end in a death."""

  def __init__(self, dying=0):
    self.starts = 0
    self._dying = dying

  def start(self):
    self.starts += 1
    return [f'127.0.0.1:{self.starts}']

  def dead(self):
    return 'worker 0 has ended' if self.starts <= self._dying else None

  def stop(self):
    pass

  def log_of(self, task):
    return f'worker-{task}.log'


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
  """All workers answer at once; signal handlers are put back."""

  def wait_for_all(addresses, timeout, should_stop):
    return [] if should_stop() else [_status(task) for task in addresses]

  monkeypatch.setattr(health, 'wait_for_all', wait_for_all)
  monkeypatch.setattr(health, 'ask', lambda *unused, **unused_too: _status(0))
  monkeypatch.setattr(chief, 'FORGOTTEN_AFTER', 0)
  handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
  yield
  for number, handler in handlers.items():
    signal.signal(number, handler)


def _status(task, incarnation=1):
  return health.Status('job', task, ('device',), incarnation)


def _supervisor(codes, said, workers=None, steps=(0,), addresses=('a:1',)):
  """Returns one whose chiefs run `codes`, one after the other."""
  codes = iter(codes)
  progress = itertools.chain(steps, itertools.repeat(steps[-1]))
  return supervisor.Supervisor(
    lambda unused: [sys.executable, '-c', next(codes)],
    () if workers else addresses,
    workers,
    wait=1,
    replan=False,
    progress=lambda: next(progress),
    say=said.append,
  )


_FAIL, _SUCCEED = 'exit(75)', ''


def test_a_run_that_gets_no_further_is_given_up():
  said = []
  # Down to an earlier checkpoint and up again is no progress.
  steps = [0, 10, 5, 10, 10]
  with pytest.raises(
    errors.UserError, match='failed 3 times in a row.*step 10'
  ):
    _supervisor([_FAIL] * 9, said, steps=steps).run()
  assert len(said) == 3


def test_a_run_that_gets_further_is_not():
  codes = [_FAIL] * 5 + [_SUCCEED]
  assert _supervisor(codes, [], steps=range(9)).run() == 0


def test_a_death_while_starting_is_a_failure_like_others():
  said = []
  workers = _Workers(dying=2)
  assert _supervisor([_SUCCEED], said, workers).run() == 0
  assert said == ['worker 0 has ended'] * 2
  with pytest.raises(errors.UserError, match='failed 3 times'):
    _supervisor([], [], _Workers(dying=9)).run()


def test_local_workers_that_do_not_answer_are_a_failure(monkeypatch):
  def wait_for_all(addresses, timeout, unused):
    raise health.NoAnswer(0, addresses[0], timeout)

  monkeypatch.setattr(health, 'wait_for_all', wait_for_all)
  said = []
  with pytest.raises(errors.UserError, match='failed 3 times'):
    _supervisor([], said, _Workers()).run()
  assert 'its log is worker-0.log' in said[0]
  assert '--job=worker' not in said[0]
  with pytest.raises(health.NoAnswer, match='--public_worker'):
    _supervisor([], said).run()


def test_a_chief_that_is_done_is_not_started_again():
  workers = _Workers()
  # It is dead when it is looked at for the second time.
  answers = iter([None])
  workers.dead = lambda: next(answers, 'worker 0 has ended')
  assert _supervisor([_SUCCEED], [], workers).run() == 0


def test_a_chief_killed_while_it_saves_is_told():
  said = []
  code = (
    'import os, signal, time\n'
    'signal.signal(signal.SIGTERM, lambda *unused: os.kill(os.getpid(), 9))\n'
    f'os.kill({os.getpid()}, signal.SIGTERM)\n'
    'time.sleep(60)\n'
  )
  assert _supervisor([code], said).run() == 128 + signal.SIGKILL
  [line] = said
  assert 'SIGKILL; steps since the last checkpoint are lost' in line


def test_lost_workers_are_named_with_what_became_of_them(monkeypatch):
  answers = {'a:1': _status(0), 'b:2': _status(1, incarnation=7), 'c:3': None}
  monkeypatch.setattr(health, 'ask', lambda address, *_, **__: answers[address])
  said = []
  codes = [_FAIL, _SUCCEED]
  three = ('a:1', 'b:2', 'c:3')
  assert _supervisor(codes, said, addresses=three).run() == 0
  assert said == [
    'worker 1 at b:2 was started anew; worker 2 at c:3 does not answer'
  ]


def test_silence_is_counted_in_unanswered_rounds(monkeypatch):
  """Time in which nobody was asked, as after Ctrl-Z, is no silence."""
  answers = iter([None, None, _status(0)])
  monkeypatch.setattr(health, 'ask', lambda *_, **__: next(answers, None))
  counts = []
  with health.Listener({0: 'a:1'}, pause=0.05) as listener:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
      counts.append(listener.unanswered()[0])
  assert [n for n, _ in itertools.groupby(counts)][:5] == [0, 1, 2, 0, 1]


def test_a_supervisor_that_is_gone_before_it_could_be_asked():
  assert not parent.is_gone(None)
  assert not parent.is_gone(os.getppid())
  with subprocess.Popen([sys.executable, '-c', '']) as gone:
    pass
  assert parent.is_gone(gone.pid)


def test_every_start_of_local_workers_takes_new_ports():
  workers = local.LocalWorkers(lambda task, found: ['true'], 2)
  first = workers.start()
  assert workers.start() != first
  workers.stop()
  workers.remove_logs()
  assert not os.path.exists(workers.log_folder)
