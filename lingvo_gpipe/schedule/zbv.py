"""ZBV: zero bubble with the memory of 1F1B, on a V (arXiv 2405.15362).

A device holds two stages, d and K - 1 - d, so a micro-batch goes down the
devices and up again, and the device that sees it first sees it last:

    stages 0, 7  FFFFFFFFIWFIWFIWFIWFIWFIWIWFIWIWFIWIWFIWIWIWIWIW...
    stages 1, 6  .FFFFFFFFIWFIWFIWFIWFIWFIWFIWIWFIWIWFIWIIIWIWIWWW..
    stages 2, 5  ..FFFFFFFFIWFIWFIWFIWFIWFIWFIWFIWIWFIWIIIIIWIWWWWW.
    stages 3, 4  ...FFFFFFFFIWFIWFIWFIWFIWFIWFIWFIWFIWIIIIIIIWWWWWWW

(K = 8, M = 8.) The loss is on device 0, which therefore begins backward
without a wait. Activations live longest on a device's first stage where they
live shortest on its second: every device holds 2 D of half the size, as much as
the first device of 1F1B.
"""

from lingvo_gpipe.schedule.action import Action, Schedule


def zbv(num_stages: int, num_micro_batches: int) -> Schedule:
  """Returns the V-shaped zero-bubble schedule of K stages on K / 2 devices."""
  num_devices = num_stages // 2
  # The pattern needs as many micro-batches as the first device warms up with.
  padded = max(num_micro_batches, 2 * num_devices - 1)
  devices = [_device(d, num_devices, padded) for d in range(num_devices)]
  # No micro-batch waits for another, so some may be left out.
  return tuple(
    tuple(a for a in actions if a.micro_batch < num_micro_batches)
    for actions in devices
  )


def _device(d, num_devices, num_micro_batches):
  down, up = d, 2 * num_devices - 1 - d
  next_micro_batch = dict.fromkeys(
    [(k, kind) for k in (down, up) for kind in 'FIW'], 0
  )
  order = []

  def do(k, kinds):
    for kind in kinds:
      i = next_micro_batch[k, kind]
      if i < num_micro_batches:
        order.append(Action(k, kind, i))
        next_micro_batch[k, kind] = i + 1

  # Fill: the way down runs ahead until the first micro-batch is back.
  for _ in range(2 * (num_devices - d) - 1):
    do(down, 'F')
  for _ in range(d):
    do(up, 'F')
    do(down, 'F')
  for _ in range(num_devices - d):
    do(up, 'FIW')
  # Steady: one of everything.
  while next_micro_batch[up, 'F'] < num_micro_batches:
    do(down, 'FIW')
    do(up, 'FIW')
  # Drain: inputs' gradients first, others wait for them.
  for _ in range(d):
    do(down, 'I')
    do(up, 'I')
  for _ in range(num_devices - d):
    do(down, 'IW')
  for k in (up, down):
    do(k, 'W' * num_micro_batches)
  return order
