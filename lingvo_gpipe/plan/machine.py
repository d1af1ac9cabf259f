"""The devices that a plan is made for."""

import dataclasses
import re
from collections.abc import Mapping

from lingvo_gpipe import errors

_UNITS = {'': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 't': 10**12}
_BINARY_UNITS = {'ki': 2**10, 'mi': 2**20, 'gi': 2**30, 'ti': 2**40}


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
  """How long a layer takes for one micro-batch, in seconds."""

  forward: float
  input_gradient: float
  weight_gradient: float


@dataclasses.dataclass(frozen=True)
class Machine:
  """What is known of the devices.

  Attributes:
    memory: bytes of each device, or of all of them; None for no limit.
    flops: floating-point operations that a device does in a second.
    speeds: of each device, relative to `flops` or the profile; none for equal.
    bandwidth: bytes a second from a device to another; None for instant.
    measured: seconds of layers by their key, where they were measured.
    update_seconds: seconds for each byte of trained weights, after the last
      backward; 0 where nothing was measured.
  """

  memory: tuple[float, ...] | None = None
  flops: float = 1e12
  speeds: tuple[float, ...] = ()
  bandwidth: float | None = None
  measured: Mapping[str, LayerSeconds] = dataclasses.field(default_factory=dict)
  update_seconds: float = 0.0

  def check(self, num_devices: int) -> None:
    """Raises a UserError if numbers are given for other devices than these."""
    for field, one_for_all in (('memory', True), ('speeds', False)):
      count = len(getattr(self, field) or ())
      if count not in (0, num_devices) and not (one_for_all and count == 1):
        raise errors.UserError(
          f'device_{field} has {count} numbers for {num_devices} devices: give '
          'one for each' + (', or one for all.' if one_for_all else '.')
        )

  def memory_of(self, device: int) -> float | None:
    """Returns the bytes of a device, None for no limit."""
    if self.memory is None:
      return None
    return self.memory[device if len(self.memory) > 1 else 0]

  def speed_of(self, device: int) -> float:
    return self.speeds[device] if self.speeds else 1.0


def parse_bytes(text: str, field: str) -> float:
  """Returns bytes from text such as `16GiB`, `8 GB` or `1e9`.

  Raises:
    UserError: it is no such text; `field` is named.
  """
  match = re.fullmatch(
    r'\s*([0-9.]+(?:e[0-9]+)?)\s*([a-zA-Z]*?)b?\s*', text, re.I
  )
  unit = match.group(2).lower() if match else None
  factor = (_UNITS | _BINARY_UNITS).get(unit)
  try:
    value = float(match.group(1)) * factor
  except (AttributeError, TypeError, ValueError):
    value = 0.0
  if value <= 0:
    raise errors.UserError(
      f'{field}={text!r}: give bytes, such as 16GiB, 8GB or 500MB.'
    )
  return value


def parse_memory(text: str | None) -> tuple[float, ...] | None:
  """Returns the bytes of devices from text such as `16GiB` or `8GiB,16GiB`."""
  if not text:
    return None
  parts = str(text).split(',')
  return tuple(parse_bytes(part, 'device_memory') for part in parts)
