"""Random schedules for tests."""

import random

from lingvo_gpipe import schedule


def random_cases(count: int, max_devices: int = 8, max_micro_batches: int = 24):
  """Yields (name, K, M, V), the same ones in every run."""
  numbers = random.Random(0)
  for _ in range(count):
    name = numbers.choice(schedule.NAMES)
    per_device = {'interleaved': numbers.randint(1, 4), 'zbv': 2}.get(name, 1)
    num_stages = per_device * numbers.randint(1, max_devices)
    yield name, num_stages, numbers.randint(1, max_micro_batches), per_device
