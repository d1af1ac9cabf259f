"""Labelled images: files of your own, or stripes made up on the spot.

Without files, image number i is a function of (seed, i): stripes whose angle
and width tell the class, moved by a random phase, under noise.

    class 0  ||||||||    1  ////////    2  --------    3  | | | |    ...

Which images a batch holds is a pure function of (seed, position in training),
so the position alone, an integer that tf.data saves, resumes a run exactly.
"""

import math
import os

import tensorflow as tf
from lingvo.core import base_input_generator, py_utils

from lingvo_gpipe import errors
from lingvo_gpipe.inputs import order

_NUM_GENERATED_HELD_OUT = 1024
_NOISE = 0.1
_MAX_CHANNEL_VALUE = 255


class ImageInput(base_input_generator.BaseInputGenerator):
  """Batches of `image`, `label` and `weight`.

  image [batch, image_size, image_size, 3], float32 from 0 to 1;
  label [batch], int32; weight [batch], float32: 0 for what fills up the last
  held-out batch, else 1.
  """

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Files to read (PNG, JPEG, GIF, BMP), as glob patterns separated by '
      'commas ("**" descends into folders). The folder of a file is its class. '
      'Empty: images are generated.',
    )
    p.Define('image_size', 224, 'Height and width to which images are scaled.')
    p.Define(
      'num_classes',
      1000,
      'Number of different labels; at least the number of folders.',
    )
    p.Define(
      'held_out',
      False,
      f'Read the held-out images (every {order.HELD_OUT_EVERY}th file, or '
      f'{_NUM_GENERATED_HELD_OUT} generated ones) once and in order, in place '
      'of the others, shuffled and without end.',
    )
    p.batch_size = 32
    p.resettable = True
    return p

  def CreateDatasource(self):
    source = order.GeneratorSource.Params()
    self.params.file_datasource = source.Set(name='images')
    super().CreateDatasource()

  def MakeDataset(self) -> tf.data.Dataset:
    """Returns the dataset of batches, NestedMaps of static shape.

    Raises:
      UserError: no file matches, there are too few, or too many folders.
    """
    p = self.params
    examples = _Files(p) if p.file_pattern else _Stripes(p)
    size = len(examples)
    if p.held_out:
      num_positions = -(-size // p.batch_size) * p.batch_size
    else:
      num_positions = tf.int64.max

    def read(position):
      image, label = examples.read(position)
      weight = tf.cast(position < size, tf.float32) if p.held_out else 1.0
      return py_utils.NestedMap(image=image, label=label, weight=weight)

    dataset = tf.data.Dataset.range(num_positions)
    dataset = dataset.map(read, tf.data.AUTOTUNE, deterministic=True)
    dataset = dataset.batch(p.batch_size, drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    # Checkpoints hold the position, not the images that were fetched ahead.
    options.experimental_symbolic_checkpoint = True
    return dataset.with_options(options)


class _Stripes:
  """Generated images: for training without end, some others held out."""

  def __init__(self, p):
    self._params = p
    # So many angles times so many widths are enough for all classes.
    self._num_angles = math.ceil(math.sqrt(p.num_classes))

  def __len__(self):
    return _NUM_GENERATED_HELD_OUT

  def read(self, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (image [size, size, 3], label) of one position."""
    p = self._params
    # Training never gets to the negative numbers.
    number = -1 - position if p.held_out else position
    seed = tf.stack([tf.constant(p.random_seed or 0, tf.int64), number])
    label_seed, phase_seed, noise_seed = tf.unstack(tf.random.split(seed, 3))
    label = tf.random.stateless_uniform(
      [], label_seed, 0, p.num_classes, tf.int32
    )
    phase = tf.random.stateless_uniform([], phase_seed, 0, 2 * math.pi)
    noise = tf.random.stateless_normal(
      [p.image_size, p.image_size, 3], noise_seed, stddev=_NOISE
    )
    stripes = 0.5 + 0.4 * tf.sin(self._wave(label) + phase)
    image = tf.clip_by_value(stripes[:, :, None] + noise, 0.0, 1.0)
    return image, label

  def _wave(self, label):
    """Returns [size, size]: how far the wave of a class is at each pixel."""
    size = self._params.image_size
    angle, width = (
      tf.cast(part, tf.float32)
      for part in (label % self._num_angles, label // self._num_angles)
    )
    direction = math.pi / self._num_angles * angle
    # From 2 waves an image on, to waves of 4 pixels.
    least, most = 2.0, max(2.0, size / 4)
    frequency = least + (most - least) / self._num_angles * width
    at = tf.range(size, dtype=tf.float32) / size
    across = tf.cos(direction) * at + tf.sin(direction) * at[:, None]
    return 2 * math.pi * frequency * across


class _Files:
  """Image files, by position; the split and the classes follow their names."""

  def __init__(self, p):
    paths = sorted(order.matching(p.file_pattern))
    if not paths:
      raise errors.UserError(
        f'file_pattern "{p.file_pattern}" matches no file.'
      )
    folders = [os.path.basename(os.path.dirname(path)) for path in paths]
    classes = sorted(set(folders))
    if len(classes) > p.num_classes:
      raise errors.UserError(
        f'file_pattern "{p.file_pattern}" matches files in {len(classes)} '
        f'folders, one for each class, but num_classes is {p.num_classes}.'
      )
    chosen = [
      j
      for j in range(len(paths))
      if order.is_held_out(j, len(paths)) == p.held_out
    ]
    if not chosen:
      raise errors.UserError(
        f'file_pattern "{p.file_pattern}" matches one file only: one for '
        'training and one to hold out are needed.'
      )
    labels = {name: label for label, name in enumerate(classes)}
    self._params = p
    self._paths = tf.constant([paths[j] for j in chosen])
    self._labels = tf.constant([labels[folders[j]] for j in chosen], tf.int32)

  def __len__(self):
    return len(self._paths)

  def read(self, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (image [size, size, 3], label) of one position."""
    p = self._params
    if p.held_out:
      index = tf.minimum(position, len(self) - 1)
    else:
      index = order.shuffle(position, len(self), p.random_seed or 0)
    pixels = tf.io.decode_image(
      tf.io.read_file(self._paths[index]), 3, expand_animations=False
    )
    size = [p.image_size, p.image_size]
    image = tf.image.resize(pixels, size, antialias=True) / _MAX_CHANNEL_VALUE
    return tf.ensure_shape(image, [*size, 3]), self._labels[index]
