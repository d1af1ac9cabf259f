"""Prints tables 1a and 1b of GPipe (arXiv 1811.06965), ours beside the paper's.

    python tools/paper_tables.py [--tables=1a,1b] [--columns=Naive-1,Pipeline-8]
        [--nosearch]

Naive-1 is one device that takes the mini-batch whole and keeps all activations;
Pipeline-K is K of them with remat=budget, schedule=1f1b, and M = 32 or one
example a micro-batch, whichever is faster. Planned from shapes alone.

    weights     at 12 bytes a parameter, as in the paper, whose GB are GiB in
                table 1b; the plan counts sums of gradients beside these
    peak        planned, of the hungriest device; where nothing fits, what it
                would take without a limit, nothing recomputed
    largest     that fits the same way, with the most micro-batches
    planning    seconds and peak host memory (VmHWM) of a fresh process for the
                column's model and each M; imports count in the memory alone
"""

import functools
import json
import re
import sys
import time
from collections.abc import Callable

import fresh_process
from absl import app, flags

from lingvo_gpipe import errors, runtime

with runtime.quiet_tensorflow():
  import tensorflow as tf
  from lingvo_gpipe.params.image import amoebanet
  from lingvo_gpipe.params.lm import gpipe_transformer

  from lingvo_gpipe import plan as plan_lib
  from lingvo_gpipe.plan import machine as machine_lib
  from lingvo_gpipe.plan import search, wiring
  from lingvo_gpipe.trainer import planning

FLAGS = flags.FLAGS
flags.DEFINE_list(
  'tables',
  ['1a', '1b'],
  'Which tables. Devices have 8GiB in 1a and 16GiB in 1b, for the 8 GB and '
  '16 GB that the cores of the paper have.',
)
flags.DEFINE_list('columns', [], 'Such as Naive-1,Pipeline-8; default: all.')
flags.DEFINE_bool('search', True, 'Also search the largest models that fit.')
flags.DEFINE_list('only', None, 'Table and column to measure once, here.')

# By column the class, and the paper's parameters and weight memory.
_COLUMNS = {
  '1a': {
    'Naive-1': ('AmoebaNetD18x208', '82M', '1.05GB'),
    'Pipeline-1': ('AmoebaNetD18x416', '318M', '3.8GB'),
    'Pipeline-2': ('AmoebaNetD18x544', '542M', '6.45GB'),
    'Pipeline-4': ('AmoebaNetD36x544', '1.05B', '12.53GB'),
    'Pipeline-8': ('AmoebaNetD72x512', '1.8B', '24.62GB'),
  },
  '1b': {
    'Naive-1': ('Transformer3', '282.2M', '3.15GiB'),
    'Pipeline-1': ('Transformer13', '785.8M', '8.8GiB'),
    'Pipeline-8': ('Transformer103', '5.3B', '59.5GiB'),
    'Pipeline-32': ('Transformer415', '21.0B', '235.1GiB'),
    'Pipeline-128': ('Transformer1663', '83.9B', '937.9GiB'),
  },
}
_DEVICE_MEMORY = {'1a': '8GiB', '1b': '16GiB'}
_FILTERS_STEP = 16  # Every D of the paper is a multiple.


def main(argv: list[str]) -> int:
  """Prints the tables; returns 2 after a mistake of the user."""
  return errors.run_command(argv, _measure if FLAGS.only else _print_tables)


def _print_tables() -> None:
  _check('tables', _COLUMNS)
  _check('columns', {c: None for name in FLAGS.tables for c in _COLUMNS[name]})
  for name in FLAGS.tables:
    columns = []
    for column in _COLUMNS[name]:
      if not FLAGS.columns or column in FLAGS.columns:
        print(f'table {name}, {column} ...', file=sys.stderr, flush=True)
        only = f'--only={name},{column}'
        columns.append(fresh_process.measure(__file__, [only], ['search']))
    for label in dict.fromkeys(label for cells in columns for label in cells):
      print(f'{label:<28}', *(f'{c.get(label, ""):>18}' for c in columns))
    print(flush=True)


def _check(flag, known):
  given = FLAGS[flag].value
  if not set(given) <= set(known):
    raise errors.UserError(
      f'--{flag}={",".join(given)}: choose from {", ".join(known)}.'
    )


def _measure() -> None:
  """Plans one column; prints its cells by their labels as JSON."""
  table, column = FLAGS.only
  name, parameters, weights = _COLUMNS[table][column]
  module = {'1a': amoebanet, '1b': gpipe_transformer}[table]
  model = getattr(module, name)
  memory = _DEVICE_MEMORY[table]
  machine = plan_lib.Machine(memory=plan_lib.parse_memory(memory))
  K, remat, counts = model.NUM_STAGES, 'budget', {32, model.BATCH_SIZE}
  if column == 'Naive-1':
    remat, counts = 'none', {1}
  choices = [search.Choice(K, K, M, '1f1b', remat) for M in sorted(counts)]
  runtime.silence_logs()
  runtime.configure(1)

  started = time.monotonic()
  planner = _planner(model)
  plans = [_plan(planner.on(machine), choice) for choice in choices]
  fitting = [found for found in plans if found]
  best = min(fitting, key=lambda f: f.forecast.step_seconds, default=None)
  seconds, host_bytes = time.monotonic() - started, _peak_host_bytes()

  best = best or planner.evaluate(choices[-1])
  ours = _num_params(best.plan.network)
  theirs = machine_lib.parse_bytes(parameters.replace('B', 'G'), column)
  number, unit = re.fullmatch(r'([0-9.]+)(\w+)', weights).groups()
  in_units = ours * 12 / machine_lib.parse_bytes(f'1{unit}', column)
  cells = {
    f'Table {table}, {memory} a device': column,
    'model': name,
    'devices K': K,
    'micro-batches M': best.choice.num_micro_batches,
    'parameters / paper': f'{_short(ours)} / {parameters}',
    '  deviation': f'{ours / theirs - 1:+.2%}',
    f'weights, {unit} / paper': f'{in_units:.2f} / {number}',
    'peak of a device, GiB': f'{max(best.forecast.device_bytes) / 2**30:.2f}',
    '  fits': 'yes' if fitting else 'no',
    'planning, s': f'{seconds:.1f}',
    '  host memory, MB': f'{host_bytes / 1e6:.0f}',
  }
  if FLAGS.search:
    cells |= _largest_models(model, machine, choices[-1])
  print(json.dumps(cells))


def _planner(model, num_micro_batches=1):
  """Returns a planner for unlimited devices."""
  task = model().Task().Set(input=model().Train(), random_seed=0)
  task.pipeline.num_micro_batches = num_micro_batches
  return planning.planner(task, model.NUM_STAGES)


def _plan(planner, choice):
  try:
    return planner.evaluate(choice)
  except plan_lib.DoesNotFit:
    return None


def _largest_models(model, machine, choice):
  """Returns cells with the largest sizes that fit, and their parameters."""
  is_image = issubclass(model, amoebanet.AmoebaNetD)
  depth, step = ('NUM_LAYERS', 3) if is_image else ('NUM_BLOCKS', 1)
  L, K = getattr(model, depth), choice.num_stages
  wish = search.Wish(choice.num_devices, model.BATCH_SIZE)

  @functools.cache
  def traced(**sizes):
    changed = type('Changed', (model,), sizes)
    return _planner(changed, choice.num_micro_batches).networks()[0]

  def network(L, **width):
    """Traces a few layers; those that are not traced are equal to one."""
    few = traced(**{depth: min(L, 4 * step)}, **width)
    return _repeated(few, max(L // step - 3, 1))

  def largest(make, start, step):
    def fits(size):
      planner = search.Planner(lambda _: make(size), machine, wish)
      # A plan of fewer layers than stages is none at all.
      return len(make(size).names) >= K and _plan(planner, choice) is not None

    size = _largest(fits, start, step)
    return f'{size} / {_short(_num_params(make(size)))}' if size else 'none'

  cells = {'largest L / parameters': largest(network, L, step)}
  if is_image and K == 1:
    cells[f'largest D, L = {L} / params'] = largest(
      lambda D: network(L, NUM_FILTERS=D), model.NUM_FILTERS, _FILTERS_STEP
    )
  return cells


def _repeated(network, times):
  """Repeats the last of equal layers in a row; nothing is traced again.

  a b c c d, 3 times: a b c c c c d.
  """
  keys, old = network.keys, network.wiring
  layers = []
  for l, key in enumerate(keys):
    ends_row = keys[l - 1 : l] == (key,) != keys[l + 1 : l + 2]
    layers += [l] * (times if ends_row else 1)

  def specs(ids):
    return tf.nest.map_structure(lambda v: old.values[v].spec, ids)

  inputs = old.layers[0].args
  builder = wiring.WiringBuilder(specs(inputs))
  for l in layers:
    if l == layers[-1]:
      builder.bring_in(specs(old.inputs[len(inputs) :]))
    builder.add(network.traces[l])
  repeated = {
    field: tuple(getattr(network, field)[l] for l in layers)
    for field in ('names', 'keys', 'traces', 'slot_bytes')
  }
  return plan_lib.Network(wiring=builder.build(), **repeated)


def _largest(fits: Callable[[int], bool], start: int, step: int) -> int:
  """Returns the largest multiple of `step` that fits; 0 if none does."""
  low, high = 0, start // step
  while fits(high * step):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    if fits(middle * step):
      low = middle
    else:
      high = middle
  return low * step


def _num_params(network):
  return sum(trace.num_params for trace in network.traces)


def _short(count):
  return f'{count / 1e9:.2f}B' if count >= 1e9 else f'{count / 1e6:.1f}M'


def _peak_host_bytes():
  with open('/proc/self/status', encoding='ascii') as file:
    return int(re.search(r'VmHWM:\s+(\d+) kB', file.read()).group(1)) * 1024


if __name__ == '__main__':
  app.run(main)
