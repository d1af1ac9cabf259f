"""Signs of life: asks a worker's own TensorFlow server how it is.

A process that is stopped still accepts connections, so only an answer counts.
That notices a process that has ended or is stopped, and a machine that is cut
off; not an op that never ends in a server that still answers.
"""

import dataclasses
import functools
import re
import threading
import time
from collections.abc import Callable, Mapping

import grpc
from google.protobuf import (
  descriptor_pb2,
  descriptor_pool,
  message_factory,
)
from tensorflow.core.framework import device_attributes_pb2

from lingvo_gpipe import errors
from lingvo_gpipe.cluster import addresses as addresses_lib

# The method of TensorFlow's worker protocol that tells its devices.
_METHOD = '/tensorflow.WorkerService/GetStatus'
# Seconds that one attempt may take.
_PAUSE = 2.0


@dataclasses.dataclass(frozen=True)
class Status:
  """What a worker says of itself.

  Attributes:
    job: its versions, see `addresses.job_name`.
    task: its number.
    devices: their full names, GPUs if it has any.
    incarnation: differs after a restart.
  """

  job: str
  task: int
  devices: tuple[str, ...]
  incarnation: int


def ask(address: str, timeout: float) -> Status | None:
  """Returns what the worker at `address` answers within `timeout` seconds."""
  with grpc.insecure_channel(
    address, options=[('grpc.enable_http_proxy', 0)]
  ) as channel:
    method = channel.unary_unary(
      _METHOD, request_serializer=None, response_deserializer=None
    )
    try:
      return _read(method(b'', timeout=timeout, wait_for_ready=True))
    except grpc.RpcError:
      return None


class NoAnswer(errors.UserError):
  """A worker does not answer.

  Attributes:
    task: its number.
    what: what there is to say, without advice on workers started by hand.
  """

  def __init__(self, task: int, address: str, seconds: float):
    self.task = task
    self.what = (
      f'worker {task} at {address} does not answer after {seconds:.0f} seconds'
    )
    super().__init__(
      f'{self.what}: start it with --job=worker --task={task} and the same '
      '--workers, on another machine with --public_worker too, see its log, or '
      'give a longer --worker_wait.'
    )


def wait_for_all(
  addresses: Mapping[int, str],
  timeout: float,
  should_stop: Callable[[], bool] = lambda: False,
) -> list[Status]:
  """Waits until every worker answers as it should; returns their statuses.

  Args:
    addresses: by task.
    timeout: seconds for all of them together.
    should_stop: asked now and then; ends the waiting.

  Raises:
    NoAnswer: one does not answer.
    UserError: one has another number, or other versions.
  """
  deadline = time.monotonic() + timeout
  found = []
  for task, address in addresses.items():
    status = None
    while status is None and not should_stop():
      left = deadline - time.monotonic()
      if left <= 0:
        raise NoAnswer(task, address, timeout)
      status = ask(address, min(left, _PAUSE))
    if status is None:
      break
    _check(task, address, status)
    found.append(status)
  return found


def changes(
  addresses: Mapping[int, str], before: Mapping[int, Status]
) -> list[str]:
  """Returns what is to be said of workers that are not as they were.

  Args:
    addresses: by task.
    before: what they answered then.
  """
  found = []
  for task, address in addresses.items():
    status = ask(address, _PAUSE)
    if status is None:
      found.append(f'worker {task} at {address} does not answer')
    elif status.incarnation != before[task].incarnation:
      found.append(f'worker {task} at {address} was started anew')
  return found


class Listener:
  """Asks all workers again and again, each on a thread of its own.

  It counts rounds, not seconds: while this process is stopped it asks nobody.
  """

  def __init__(self, addresses: Mapping[int, str], pause: float):
    self._addresses = addresses
    self._pause = pause
    self._unanswered = dict.fromkeys(addresses, 0)
    self._stop = threading.Event()

  def __enter__(self) -> 'Listener':
    for task, address in self._addresses.items():
      threading.Thread(
        target=self._listen, args=(task, address), daemon=True
      ).start()
    return self

  def __exit__(self, *unused):
    self._stop.set()

  def unanswered(self) -> dict[int, int]:
    """Returns how many times in a row each worker has not answered."""
    return dict(self._unanswered)

  def _listen(self, task, address):
    while not self._stop.wait(self._pause):
      if ask(address, timeout=self._pause) is not None:
        self._unanswered[task] = 0
      else:
        self._unanswered[task] += 1


def _check(task, address, status):
  wanted = addresses_lib.job_name()
  if status.job != wanted:
    raise errors.UserError(
      f'worker {task} at {address} is {status.job!r}, the trainer {wanted!r}: '
      'install the same versions of lingvo_gpipe and tensorflow everywhere.'
    )
  if status.task != task:
    raise errors.UserError(
      f'the worker at {address} was started as task {status.task}, but is '
      f'number {task} of the workers: give each --task once, in the order of '
      'the addresses.'
    )


def _read(answer: bytes) -> Status:
  devices = _status_message().FromString(answer).device_attributes
  match = re.match(r'/job:(\w+)/replica:\d+/task:(\d+)/', devices[0].name)
  gpus = [d.name for d in devices if d.device_type == 'GPU']
  cpus = [d.name for d in devices if d.device_type == 'CPU']
  return Status(
    job=match.group(1),
    task=int(match.group(2)),
    devices=tuple(gpus or cpus),
    incarnation=devices[0].incarnation,
  )


@functools.cache
def _status_message():
  """Returns the answer's class: TensorFlow's Python has no worker.proto."""
  attributes = device_attributes_pb2.DeviceAttributes.DESCRIPTOR
  file = descriptor_pb2.FileDescriptorProto(
    name='lingvo_gpipe/get_status.proto',
    package='lingvo_gpipe',
    syntax='proto3',
    dependency=[attributes.file.name],
  )
  field = file.message_type.add(name='GetStatusResponse').field.add(
    name='device_attributes', number=1, type_name=f'.{attributes.full_name}'
  )
  field.type = field.TYPE_MESSAGE
  field.label = field.LABEL_REPEATED
  pool = descriptor_pool.Default()
  pool.Add(file)
  return message_factory.GetMessageClass(
    pool.FindMessageTypeByName('lingvo_gpipe.GetStatusResponse')
  )
