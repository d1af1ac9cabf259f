"""Text as bytes: the standard library's source, or files of your own.

Files are cut into windows, each predicting every next byte:

    file     i m p o r t   o s \\n
    ids      i m p o | r t _ o | s          sequence_length 4
    labels   m p o r | t _ o s | \\n         the last window is padded, weight 0

Which windows a batch holds is a pure function of (seed, position in training),
so the position alone, an integer that tf.data saves, resumes a run exactly.
"""

import os
import sysconfig
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from lingvo.core import base_input_generator, py_utils

from lingvo_gpipe import errors
from lingvo_gpipe.inputs import order

# Not everywhere installed, so left out: the text is the same on all systems.
_STANDARD_LIBRARY_SKIPS = {'site-packages', 'dist-packages', 'test', 'tests'}


class ByteTextInput(base_input_generator.BaseInputGenerator):
  """Batches of bytes: `ids`, `labels` and `weights`, each [batch, time]."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Files to read, as glob patterns separated by commas ("**" descends into '
      "folders). Empty: the source of the running Python's standard library.",
    )
    p.Define('sequence_length', 128, 'Bytes in a sequence.')
    p.Define(
      'held_out',
      False,
      f'Read the held-out files (every {order.HELD_OUT_EVERY}th) once and in '
      'order, in place of the others, shuffled and without end.',
    )
    p.batch_size = 32
    p.resettable = True
    return p

  def CreateDatasource(self):
    self.params.file_datasource = order.GeneratorSource.Params().Set(
      name='text'
    )
    super().CreateDatasource()

  def MakeDataset(self) -> tf.data.Dataset:
    """Returns the dataset of batches, NestedMaps of static shape.

    Raises:
      UserError: no file matches, or they hold too little text.
    """
    p = self.params
    windows = _Windows(p.file_pattern, p.held_out, p.sequence_length)
    if len(windows) < p.batch_size and not p.held_out:
      raise errors.UserError(
        f'The text of {windows.origin} makes only {len(windows)} sequences of '
        f'{p.sequence_length} bytes, a batch needs {p.batch_size}: give more '
        'text, or set a smaller batch_size or sequence_length.'
      )
    if p.held_out:
      positions = tf.data.Dataset.range(0, len(windows), p.batch_size)
    else:
      positions = tf.data.Dataset.range(0, tf.int64.max, p.batch_size)

    def read_batch(position):
      indices = position + tf.range(p.batch_size, dtype=tf.int64)
      if not p.held_out:
        indices = order.shuffle(indices, len(windows), p.random_seed or 0)
      ids, labels, weights = tf.numpy_function(
        windows.read,
        [indices],
        [tf.int32, tf.int32, tf.float32],
        stateful=False,
      )
      batch = py_utils.NestedMap(ids=ids, labels=labels, weights=weights)
      return batch.Transform(
        lambda t: tf.ensure_shape(t, [p.batch_size, p.sequence_length])
      )

    return positions.map(read_batch).prefetch(2)


class _Windows:
  """All windows of the text, by index. The text is held in memory."""

  def __init__(self, file_pattern: str, held_out: bool, length: int):
    self.origin = file_pattern or "Python's standard library"
    paths = sorted(order.matching(file_pattern) if file_pattern else _library())
    if not paths:
      raise errors.UserError(f'file_pattern "{file_pattern}" matches no file.')
    texts = [np.fromfile(path, np.uint8) for path in paths]
    texts = [text for text in texts if len(text) > 1]
    texts = _held_out_split(texts, held_out)
    if not texts:
      raise errors.UserError(
        f'The text of {self.origin} is empty or too short to be split into '
        'training and held-out files.'
      )
    self._length = length
    self._text = np.concatenate(texts)
    sizes = np.array([len(text) for text in texts])
    # The last byte of a file is a label only.
    counts = -(-(sizes - 1) // length)
    self._file_stops = np.cumsum(sizes)
    self._window_stops = np.cumsum(counts)
    self._starts = self._file_stops - sizes
    self._first_windows = self._window_stops - counts

  def __len__(self):
    return int(self._window_stops[-1])

  def read(self, indices: np.ndarray):
    """Returns (ids, labels, weights), [number of indices, length] each.

    An index beyond the last window gives a sequence of weight 0.
    """
    known = np.minimum(indices, len(self) - 1)
    files = np.searchsorted(self._window_stops, known, side='right')
    starts = self._starts[files] + self._length * (
      known - self._first_windows[files]
    )
    at = starts[:, None] + np.arange(self._length + 1)
    inside = at < self._file_stops[files][:, None]
    inside &= (indices < len(self))[:, None]
    text = self._text[np.minimum(at, len(self._text) - 1)] * inside
    text = text.astype(np.int32)
    return text[:, :-1], text[:, 1:], inside[:, 1:].astype(np.float32)


def _held_out_split(texts: list[np.ndarray], held_out: bool):
  """Splits by file; a lone file gives its last part to evaluation."""
  if len(texts) == 1:
    at = len(texts[0]) - len(texts[0]) // order.HELD_OUT_EVERY
    parts = texts[0][:at], texts[0][at:]
    return [part for part in [parts[held_out]] if len(part) > 1]
  return [
    text
    for j, text in enumerate(texts)
    if order.is_held_out(j, len(texts)) == held_out
  ]


def _library() -> Iterator[str]:
  """Yields the files of the standard library, those all systems have."""
  root = sysconfig.get_paths()['stdlib']
  for folder, subfolders, files in os.walk(root):
    subfolders[:] = set(subfolders) - _STANDARD_LIBRARY_SKIPS
    yield from (
      os.path.join(folder, name) for name in files if name.endswith('.py')
    )
