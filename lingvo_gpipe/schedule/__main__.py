"""Shows a schedule: `python -m lingvo_gpipe.schedule --help`."""

from absl import app, flags

from lingvo_gpipe import errors
from lingvo_gpipe.schedule import (
  by_name,
  chrome_trace,
  grid,
  memory,
  picture,
  simulation,
  text,
  verification,
)
from lingvo_gpipe.schedule import timeline as timeline_lib

FLAGS = flags.FLAGS

flags.DEFINE_enum('schedule', '1f1b', by_name.NAMES, 'Which schedule.')
flags.DEFINE_string(
  'schedule_file', None, 'A schedule of your own: one line a device, `0F0 ...`.'
)
flags.DEFINE_integer('num_stages', 4, 'K, on all devices together.')
flags.DEFINE_integer('num_micro_batches', 8, 'M.')
flags.DEFINE_integer(
  'virtual_stages', None, 'Stages a device, for interleaved; default: 2.'
)
flags.DEFINE_float(
  'forward', 1.0, 'Time of a forward of one stage.', lower_bound=0
)
flags.DEFINE_float(
  'backward',
  None,
  'Time of a whole backward; default: the two halves together.',
  lower_bound=0,
)
flags.DEFINE_float(
  'input_gradient', 1.0, 'Time of the input half of a backward.', lower_bound=0
)
flags.DEFINE_float(
  'weight_gradient', 1.0, 'Time of the weight half of it.', lower_bound=0
)
flags.DEFINE_float(
  'transfer', 0.0, 'Time from a device to the next.', lower_bound=0
)
flags.DEFINE_float(
  'activation_bytes',
  None,
  'What a stage holds of one micro-batch in flight; default: count these.',
  lower_bound=0,
)
flags.DEFINE_integer(
  'max_in_flight', None, 'Refuse a schedule with more in flight on a device.'
)
flags.DEFINE_multi_string(
  'output',
  [],
  'Also write to this file: a picture (.png, .svg, .pdf), a Chrome trace for '
  'Perfetto (.json) or the schedule as text (.txt). May be repeated.',
)
_PICTURES = ('.png', '.svg', '.pdf')


def main(argv: list[str]) -> int:
  """Prints and draws; returns 2 after a mistake of the user."""
  return errors.run_command(argv, _show)


def _show() -> None:
  num_stages, num_micro_batches = FLAGS.num_stages, FLAGS.num_micro_batches
  for path in FLAGS.output:
    if not path.endswith((*_PICTURES, '.json', '.txt')):
      raise errors.UserError(
        f'--output={path}: choose .png, .svg, .pdf, .json or .txt.'
      )
  schedule = by_name.make_or_read(
    FLAGS.schedule,
    num_stages,
    num_micro_batches,
    FLAGS.virtual_stages,
    FLAGS.schedule_file,
  )
  verification.verify(
    schedule,
    num_stages,
    num_micro_batches,
    max_in_flight=FLAGS.max_in_flight,
  )
  times = simulation.equal_times(
    num_stages,
    forward=FLAGS.forward,
    backward=FLAGS.backward,
    input_gradient=FLAGS.input_gradient,
    weight_gradient=FLAGS.weight_gradient,
    transfer=FLAGS.transfer,
  )
  timeline = simulation.simulate(schedule, times)
  if not timeline_lib.makespan(timeline):
    raise errors.UserError('All times are 0: set --forward or --backward.')
  title = FLAGS.schedule_file or FLAGS.schedule
  title = f'{title}, K = {num_stages}, M = {num_micro_batches}'
  print(f'{title}, {len(schedule)} devices\n')
  print(grid.to_text(timeline))
  print(_figures(schedule, times, timeline))
  for path in FLAGS.output:
    _write(path, title, schedule, timeline)
    print(f'wrote {path}')


def _figures(schedule, times, timeline) -> str:
  causes = simulation.bubble_by_cause(schedule, times)
  parts = [f'{name} {share:.1%}' for name, share in causes.items()]
  unit = 'bytes' if FLAGS.activation_bytes else 'micro-batches'
  size = FLAGS.activation_bytes or 1
  peaks = memory.peaks(schedule, [size] * FLAGS.num_stages)
  busy = timeline_lib.busy_seconds(timeline)
  whole = timeline_lib.makespan(timeline)
  lines = [
    f'makespan     {whole:g}',
    f'bubble       {timeline_lib.bubble(timeline):.1%} ({", ".join(parts)})',
    f'busy         {" ".join(f"{b / whole:.1%}" for b in busy)}',
    f'peak held    {" ".join(f"{p:,.12g}" for p in peaks)} {unit} of a stage',
  ]
  return '\n'.join(lines)


def _write(path, title, schedule, timeline) -> None:
  try:
    if path.endswith(_PICTURES):
      picture.save({title: timeline}, path)
      return
    content = (
      f'# {title}\n{text.to_text(schedule)}'
      if path.endswith('.txt')
      else chrome_trace.to_json({title: timeline})
    )
    with open(path, 'w', encoding='utf-8') as file:
      file.write(content)
  except OSError as error:
    raise errors.UserError(f'--output={path}: {error.strerror}.') from error


if __name__ == '__main__':
  app.run(main)
