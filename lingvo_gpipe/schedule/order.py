"""Merges the devices' lists into one order that respects every dependency."""

from lingvo_gpipe.schedule.action import Action, Schedule, needs


def global_order(schedule: Schedule, num_stages: int) -> list[Action]:
  """Returns all actions, each after those that it needs.

  The order within a device is that of the schedule.

  Raises:
    ValueError: the devices wait for each other for ever; the message lists
      what each of them is stuck at.
  """
  order, done = [], set()
  positions = [0] * len(schedule)

  def ready(device):
    actions = schedule[device]
    return positions[device] < len(actions) and done.issuperset(
      needs(actions[positions[device]], num_stages)
    )

  total = sum(len(actions) for actions in schedule)
  while len(order) < total:
    runnable = [d for d in range(len(schedule)) if ready(d)]
    if not runnable:
      stuck = [
        str(actions[position])
        for actions, position in zip(schedule, positions, strict=True)
        if position < len(actions)
      ]
      raise ValueError(f'the schedule deadlocks at {", ".join(stuck)}')
    for device in runnable:
      action = schedule[device][positions[device]]
      order.append(action)
      done.add(action)
      positions[device] += 1
  return order
