"""Shows what would happen, without doing it: `python -m lingvo_gpipe.plan`.

Takes the trainer's flags, and makes the plan that the trainer would carry out.
"""

import sys

from absl import app, flags

from lingvo_gpipe import errors, runtime

with runtime.quiet_tensorflow():
  from lingvo_gpipe import pipelining_params
  from lingvo_gpipe.plan import json_text, picture, text
  from lingvo_gpipe.trainer import models, options, planning

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(options)  # So that --help shows them.

flags.DEFINE_float(
  'device_flops',
  1e12,
  'FLOPs that a device really does in a second, for times without --profile. '
  'With --profile=FILE, layers that the file lacks are measured here first.',
  lower_bound=1,
)
flags.DEFINE_float(
  'bandwidth',
  None,
  'Bytes a second from a device to the next; default: transfers take no time.',
  lower_bound=1,
)
flags.DEFINE_multi_string(
  'output',
  [],
  'Also write the plan to this file: .json, or a picture (.png, .svg, .pdf). '
  'May be repeated.',
)
flags.DEFINE_bool('layers', False, 'Also list every layer.')
_PICTURES = ('.png', '.svg', '.pdf')


def main(argv: list[str]) -> int:
  """Prints the plan; returns 2 after a mistake of the user."""
  runtime.silence_logs()
  return errors.run_command(argv, _show)


def _show() -> None:
  for path in FLAGS.output:
    if not path.endswith((*_PICTURES, '.json')):
      raise errors.UserError(
        f'--output={path}: choose .json, .png, .svg or .pdf.'
      )
  if not FLAGS.model:
    raise errors.UserError(
      '--model is missing; --list_models of the trainer prints all names.'
    )
  task, task.input = options.model_params(models.find(FLAGS.model), 'Train')
  pipeline = task.pipeline
  pipelining_params.check(pipeline)
  devices = planning.num_devices(pipeline, FLAGS.num_devices)
  runtime.configure(devices if FLAGS.profile else 1)
  planner = planning.planner(task, devices)
  if FLAGS.profile:
    planning.profile(task, planner, FLAGS.profile, devices, _progress)
  machine = pipelining_params.machine(
    pipeline, flops=FLAGS.device_flops, bandwidth=FLAGS.bandwidth
  )
  machine.check(devices)
  found = planner.on(machine).fastest(_progress)
  _progress('')
  write = text.to_text if FLAGS.layers else text.summary
  print(f'{FLAGS.model}: {found.choice}')
  print(write(found.plan, found.forecast, machine, pipeline.num_replicas))
  for path in FLAGS.output:
    _write(path, found, machine)
    print(f'wrote {path}')


def _progress(line: str) -> None:
  """Shows what is going on, on a terminal."""
  if sys.stderr.isatty():
    print(f'\r\033[K{line}', end='', file=sys.stderr, flush=True)


def _write(path, found, machine) -> None:
  try:
    if path.endswith(_PICTURES):
      picture.save(f'{FLAGS.model}: {found.choice}', found, machine, path)
      return
    with open(path, 'w', encoding='utf-8') as file:
      file.write(json_text.to_json(found, machine))
  except OSError as error:
    raise errors.UserError(f'--output={path}: {error.strerror}.') from error


if __name__ == '__main__':
  app.run(main)
