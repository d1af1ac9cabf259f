"""What a run tells: lines or a progress bar, metrics.jsonl, TensorBoard."""

import json
import math
import os
import sys
import time

import tensorflow as tf
import tqdm

# Seconds between lines where the output is not a terminal.
_LINE_EVERY = 5.0


class MetricsFile:
  """A file of one JSON object a line, and the same numbers in TensorBoard."""

  def __init__(self, logdir: str, name: str, restored_step: float):
    """Opens `<name>.jsonl` and an event file in the folder `<name>`.

    Rows of steps after `restored_step` are dropped: they are about to be
    written again by the run that goes on from there.
    """
    path = os.path.join(logdir, f'{name}.jsonl')
    _drop_rows_after(path, restored_step)
    self._file = open(path, 'a', encoding='utf-8')  # noqa: SIM115
    self._writer = tf.summary.create_file_writer(os.path.join(logdir, name))

  def write(self, row: dict) -> None:
    """Appends `row`, which has a `step`; what is not finite becomes a null."""
    finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
    self._file.write(json.dumps(finite) + '\n')
    self._file.flush()
    with self._writer.as_default(step=row['step']):
      for key, value in row.items():
        if key != 'step':
          tf.summary.scalar(key, value)

  def close(self) -> None:
    self._file.close()
    self._writer.close()


class Progress:
  """Shows steps as they pass: a bar on a terminal, else a line now and then."""

  def __init__(self, first_step: int, last_step: int, loss_name: str):
    self._last_step = last_step
    self._first_step = first_step
    self._loss_name = loss_name
    self._started = time.monotonic()
    self._line_due = 0.0
    self._bar = None
    if sys.stderr.isatty():
      self._bar = tqdm.tqdm(
        initial=first_step, total=last_step, unit='step', dynamic_ncols=True
      )

  def step(self, row: dict) -> None:
    """Shows the metrics of a step."""
    shown = (
      f'{self._loss_name} {row[self._loss_name]:.4f}, '
      f'{row["tokens_per_second"]:,.0f} tokens/s'
    )
    if self._bar is not None:
      self._bar.set_postfix_str(shown)
      self._bar.update(row['step'] - self._bar.n)
      return
    now = time.monotonic()
    if now >= self._line_due or row['step'] == self._last_step:
      self._line_due = now + _LINE_EVERY
      per_step = (now - self._started) / (row['step'] - self._first_step)
      left = _duration(per_step * (self._last_step - row['step']))
      say(f'step {row["step"]}/{self._last_step}, {shown}, {left} left')

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()


def say(text: str) -> None:
  """Prints a line without disturbing a progress bar."""
  tqdm.tqdm.write(text, file=sys.stderr)


def last_step(logdir: str, name: str) -> int:
  """Returns the last step of which `<name>.jsonl` has a row, or else 0."""
  path = os.path.join(logdir, f'{name}.jsonl')
  if not os.path.exists(path):
    return 0
  with open(path, encoding='utf-8') as file:
    steps = [step for row in file if (step := _step_of_row(row)) < math.inf]
  return max(steps, default=0)


def _drop_rows_after(path: str, step: float) -> None:
  if not os.path.exists(path):
    return
  with open(path, encoding='utf-8') as file:
    rows = file.readlines()
  kept = [row for row in rows if _step_of_row(row) <= step]
  if kept != rows:
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
      file.writelines(kept)
    os.replace(path + '.tmp', path)


def _step_of_row(row: str) -> float:
  try:
    return json.loads(row)['step']
  except ValueError:  # A line cut short when the process was killed.
    return math.inf


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}'
