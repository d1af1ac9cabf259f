"""Finds the fastest plan among all that the user leaves open.

Every candidate is cut, rematerialised and simulated; those that could not beat
the best one even without any bubble are passed over.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from lingvo_gpipe import errors, micro_batches
from lingvo_gpipe import schedule as schedule_lib
from lingvo_gpipe.plan import costs as costs_lib
from lingvo_gpipe.plan import decide
from lingvo_gpipe.plan import forecast as forecast_lib
from lingvo_gpipe.plan import machine as machine_lib
from lingvo_gpipe.plan import plan as plan_lib

AUTO = 'auto'
# Steps this much slower are as good if they take less memory.
_AS_FAST = 1.001


@dataclasses.dataclass(frozen=True)
class Wish:
  """What is asked for; `auto` leaves it to the planner.

  Attributes:
    num_devices: how many there are; as many as are useful are taken.
    batch_size: examples in a mini-batch.
    num_stages: K or auto.
    num_micro_batches: M or auto.
    schedule: a name or auto.
    virtual_stages: V, for interleaved; None for its own.
    schedule_file: a schedule of the user's own, or None.
    remat: a name or auto.
    cuts: the layers of each stage if they are given, else None.
  """

  num_devices: int
  batch_size: int
  num_stages: int | str = AUTO
  num_micro_batches: int | str = AUTO
  schedule: str = AUTO
  virtual_stages: int | None = None
  schedule_file: str | None = None
  remat: str = AUTO
  cuts: tuple[range, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
  """A point in the space of plans."""

  num_stages: int
  num_devices: int
  num_micro_batches: int
  schedule: str
  remat: str

  def __str__(self):
    return (
      f'num_stages={self.num_stages}, num_micro_batches='
      f'{self.num_micro_batches}, schedule={self.schedule}, remat={self.remat}'
    )


@dataclasses.dataclass(frozen=True)
class Found:
  """The plan of a choice and what it promises."""

  choice: Choice
  plan: plan_lib.Plan
  forecast: forecast_lib.Forecast


class Planner:
  """Makes plans for one network and machine.

  Networks are traced once for each size of a micro-batch.
  """

  def __init__(
    self,
    trace: Callable[[int], costs_lib.Network],
    machine: machine_lib.Machine,
    wish: Wish,
  ):
    """Sets up.

    Args:
      trace: returns the network for micro-batches of so many examples.
      machine: what is known of the devices.
      wish: what is asked for.
    """
    self._trace = trace
    self._machine = machine
    self._wish = wish
    self._networks = {}
    # Seconds of a micro-batch on one device, by network.
    self._work = {}

  def networks(self) -> list[costs_lib.Network]:
    """Returns the layers, traced for each size of micro-batch in question."""
    for choice in self._choices(self._wish):
      self._network(choice)
    return list(self._networks.values())

  def on(self, machine: machine_lib.Machine) -> 'Planner':
    """Returns a planner for another machine."""
    other = Planner(self._trace, machine, self._wish)
    other._networks = self._networks
    return other

  def fastest(
    self, progress: Callable[[str], None] = lambda text: None
  ) -> Found:
    """Returns the fastest plan that fits.

    Args:
      progress: told about every candidate.

    Raises:
      UserError: none fits; says what would.
    """
    best = None
    choices = sorted(self._choices(self._wish), key=self._bound)
    for number, choice in enumerate(choices):
      if best and self._bound(choice) >= best.forecast.step_seconds:
        break
      progress(f'plan {number + 1} of {len(choices)}: {choice}')
      try:
        found = self.evaluate(choice)
      except decide.DoesNotFit:
        continue
      if best is None or _is_better(found, best):
        best = found
    if best is None:
      raise errors.UserError(self._advice())
    return best

  def evaluate(self, choice: Choice) -> Found:
    """Returns the plan of one choice.

    Raises:
      DoesNotFit: there is none within the memory of the devices.
    """
    return self._evaluate(choice, self._machine)

  def _evaluate(self, choice, machine) -> Found:
    wish = self._wish
    schedule = self._schedule(choice)
    costs = costs_lib.Costs(self._network(choice), machine)
    cuts = wish.cuts or decide.cut(costs, schedule, choice.remat)
    sizes = micro_batches.even_sizes(wish.batch_size, choice.num_micro_batches)
    plan = plan_lib.make_plan(
      costs.network,
      sizes,
      schedule,
      [f'device {d}' for d in range(len(schedule))],
      choice.remat,
      cuts,
      decide.remats(costs, schedule, choice.remat, cuts),
    )
    forecast = forecast_lib.predict(plan, machine)
    for device, needed in enumerate(forecast.device_bytes):
      if machine.memory and needed > machine.memory_of(device):
        raise decide.DoesNotFit(
          f'device {device} needs {needed:,.0f} bytes, more than device_memory'
        )
    return Found(choice, plan, forecast)

  def _schedule(self, choice):
    return schedule_lib.make_or_read(
      choice.schedule,
      choice.num_stages,
      choice.num_micro_batches,
      None if self._wish.schedule == AUTO else self._wish.virtual_stages,
      self._wish.schedule_file,
    )

  def _network(self, choice) -> costs_lib.Network:
    size, *_ = micro_batches.even_sizes(
      self._wish.batch_size, choice.num_micro_batches
    )
    if size not in self._networks:
      self._networks[size] = self._trace(size)
    return self._networks[size]

  def _bound(self, choice) -> float:
    """Returns seconds that no plan of this choice can do without."""
    network = self._network(choice)
    if id(network) not in self._work:
      times = costs_lib.Costs(network, self._machine).times(
        0, len(network.traces)
      )
      self._work[id(network)] = sum(times.values())
    work = self._work[id(network)]
    speeds = [self._machine.speed_of(d) for d in range(choice.num_devices)]
    return work * choice.num_micro_batches / sum(speeds)

  def _choices(self, wish: Wish) -> Iterator[Choice]:
    if wish.schedule_file:
      schedules = ['schedule_file']
    elif wish.schedule == AUTO:
      schedules = schedule_lib.NAMES
    else:
      schedules = [wish.schedule]
    remats = [wish.remat]
    if wish.remat == AUTO:
      remats = ['none']
      if self._machine.memory:
        remats += ['except_last', 'budget']
    counts = [wish.num_micro_batches]
    if wish.num_micro_batches == AUTO:
      counts = sorted({*_powers_of_two(wish.batch_size), wish.batch_size})
    for schedule, M, remat in itertools.product(schedules, counts, remats):
      for K, num_devices in self._stage_counts(wish, schedule):
        yield Choice(K, num_devices, M, schedule, remat)

  def _stage_counts(self, wish, schedule):
    """Yields numbers of stages and of the devices that they take."""
    per_device = {'interleaved': wish.virtual_stages or 2, 'zbv': 2}
    per_device = per_device.get(schedule, 1)
    if wish.num_stages != AUTO:
      if wish.schedule != AUTO or wish.num_stages % per_device == 0:
        yield wish.num_stages, max(wish.num_stages // per_device, 1)
      return
    num_layers = len(self._any_network(wish).traces)
    for devices in {*_powers_of_two(wish.num_devices), wish.num_devices}:
      if devices * per_device <= num_layers:
        yield devices * per_device, devices

  def _any_network(self, wish):
    M = wish.num_micro_batches
    M = wish.batch_size if M == AUTO else M
    return self._network(Choice(1, 1, M, '', ''))

  def _advice(self) -> str:
    """Returns what would fit, as nothing that was asked for does."""
    wish, memory = self._wish, self._machine.memory
    frugal = self._frugal(wish)
    asked = f'device_memory={_binary(min(memory))}'
    advice = []
    if needed := self._least_memory(frugal):
      advice.append(f'device_memory={_binary(needed)}')
    num_layers = len(self._any_network(wish).traces)
    if stages := _first(
      lambda K: self._fits(dataclasses.replace(frugal, num_stages=K)),
      _doubled(frugal.num_stages, num_layers),
    ):
      advice.append(f'num_stages={stages}')
    if counts := _first(
      lambda M: self._fits(dataclasses.replace(frugal, num_micro_batches=M)),
      _doubled(frugal.num_micro_batches, wish.batch_size),
    ):
      advice.append(f'num_micro_batches={counts}')
    if wish.remat not in (AUTO, 'budget') and self._fits(
      dataclasses.replace(frugal, remat='budget')
    ):
      advice.append('remat=budget')
    fix = '; or '.join(advice) or 'smaller layers or a smaller batch'
    return f'No plan fits into {asked} with {frugal}. What would fit: {fix}.'

  def _frugal(self, wish) -> Choice:
    """Returns the choice among those asked for that takes least memory."""

    def thrift(choice):
      return (
        choice.num_stages,
        choice.num_micro_batches,
        choice.schedule == '1f1b',
        choice.remat == 'budget',
      )

    return max(self._choices(wish), key=thrift)

  def _fits(self, choice, machine=None) -> bool:
    try:
      self._evaluate(choice, machine or self._machine)
    except errors.UserError:  # It may not exist, either.
      return False
    return True

  def _least_memory(self, choice) -> float | None:
    """Returns the memory of equal devices with which `choice` just fits."""
    low, high = max(self._machine.memory), None
    while high is None or high > low * 1.01:
      middle = low * 2 if high is None else (low + high) / 2
      if middle > 2**60:
        return None
      machine = dataclasses.replace(self._machine, memory=(middle,))
      if self._fits(choice, machine):
        high = middle
      else:
        low = middle
    return high


def _is_better(found: Found, best: Found) -> bool:
  ours, theirs = found.forecast, best.forecast
  if ours.step_seconds * _AS_FAST < theirs.step_seconds:
    return True
  if theirs.step_seconds * _AS_FAST < ours.step_seconds:
    return False
  return max(ours.device_bytes) < max(theirs.device_bytes)


def _powers_of_two(most: int) -> list[int]:
  return [2**j for j in range(most.bit_length())]


def _doubled(start: int, most: int) -> list[int]:
  """Returns start times 2, 4, ... and at last `most`."""
  larger = [start * 2**j for j in range(1, 64) if start * 2**j < most]
  return larger + ([most] if most > start else [])


def _first(test: Callable[[int], bool], numbers: Sequence[int]) -> int | None:
  return next((n for n in numbers if test(n)), None)


def _binary(value: float) -> str:
  """Returns e.g. `1.21GiB`, rounded up."""
  unit = 'GiB' if value >= 2**30 else 'MiB'
  scaled = value / (2**30 if unit == 'GiB' else 2**20)
  return f'{math.ceil(scaled * 100) / 100:g}{unit}'
