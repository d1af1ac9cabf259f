"""Signs of life: asks a worker's own TensorFlow server how it is.

A process that hangs or is stopped still accepts connections, so only an answer
counts.
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
  """A worker does not answer; `task` is its number."""

  def __init__(self, text: str, task: int):
    super().__init__(text)
    self.task = task


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
        raise NoAnswer(
          f'worker {task} at {address} does not answer after {timeout:.0f} '
          f'seconds: start it with --job=worker --task={task} and the same '
          '--workers, or see its log.',
          task,
        )
      status = ask(address, min(left, _PAUSE))
    if status is None:
      break
    _check(task, address, status)
    found.append(status)
  return found


class Listener:
  """Asks all workers again and again, each on a thread of its own."""

  def __init__(self, addresses: Mapping[int, str], pause: float):
    self._addresses = addresses
    self._pause = pause
    self._heard = {}
    self._stop = threading.Event()

  def __enter__(self) -> 'Listener':
    for task, address in self._addresses.items():
      threading.Thread(
        target=self._listen, args=(task, address), daemon=True
      ).start()
    return self

  def __exit__(self, *unused):
    self._stop.set()

  def heard(self) -> dict[int, float]:
    """Returns when each worker last answered, by time.monotonic."""
    return dict(self._heard)

  def _listen(self, task, address):
    while not self._stop.wait(self._pause):
      if ask(address, timeout=self._pause) is not None:
        self._heard[task] = time.monotonic()


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
