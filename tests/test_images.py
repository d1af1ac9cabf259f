"""Images, generated or from files, in an order that can be resumed."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.inputs import images

_SIZE = 8


def _dataset(**fields):
  p = images.ImageInput.Params().Set(
    name='input',
    random_seed=1,
    batch_size=4,
    image_size=_SIZE,
    num_classes=4,
  )
  return p.Set(**fields).Instantiate().datasource.GetDataset()


def _take(dataset, num_batches):
  """Returns the images, the labels and the weights of some batches."""
  batches = list(dataset.take(num_batches).as_numpy_iterator())
  return [
    np.concatenate([batch[field] for batch in batches])
    for field in ('image', 'label', 'weight')
  ]


def _write(folder, name, values, size=_SIZE):
  """Writes a PNG of one colour for each value; its name tells the value."""
  (folder / name).mkdir()
  for value in values:
    pixels = tf.fill([size, size, 3], tf.constant(value, tf.uint8))
    path = folder / name / f'{value:03d}.png'
    path.write_bytes(tf.io.encode_png(pixels).numpy())


def _values(found):
  return [round(255 * float(image.mean())) for image in found]


@pytest.mark.parametrize('held_out', [False, True])
def test_generated_images_depend_on_seed_and_position_alone(held_out):
  found, labels, weights = _take(_dataset(held_out=held_out), 3)
  again, same_labels, _ = _take(_dataset(held_out=held_out), 3)
  np.testing.assert_array_equal(found, again)
  np.testing.assert_array_equal(labels, same_labels)
  assert len({image.tobytes() for image in found}) == 12
  assert 0 <= found.min() and found.max() <= 1
  assert set(labels) <= set(range(4))
  np.testing.assert_array_equal(weights, 1)
  others, _, _ = _take(_dataset(held_out=held_out, random_seed=2), 3)
  assert (found != others).any()


def test_generated_held_out_images_are_others_and_end():
  held_out, labels, weights = _take(_dataset(held_out=True, batch_size=100), -1)
  assert len(held_out) == 1100 and weights.sum() == 1024
  assert np.bincount(labels).min() > 200
  train, _, _ = _take(_dataset(batch_size=100), 3)
  assert not {x.tobytes() for x in train} & {x.tobytes() for x in held_out}


@pytest.mark.parametrize('num_classes', [2, 10, 1000])
def test_stripes_tell_the_class(num_classes):
  """The strongest wave of an image's spectrum belongs to one class only."""
  p = {'image_size': 224, 'num_classes': num_classes, 'batch_size': 64}
  found, labels, _ = _take(_dataset(**p), 1)
  spectra = np.abs(np.fft.fft2(found[..., 0] - 0.5, s=(512, 512)))
  strongest = spectra.reshape(len(labels), -1).argmax(1)
  for label in labels:
    rows, columns = np.divmod(strongest[labels == label], 512)
    mirrored = rows > 256
    rows = np.where(mirrored, 512 - rows, rows)
    columns = np.where(mirrored, -columns % 512, columns)
    assert np.ptp(rows) <= 2
    others = strongest[labels != label]
    assert not set(strongest[labels == label]) & set(others)


def test_element_spec_makes_no_data(monkeypatch):
  def no_data(*unused_args):
    raise AssertionError('data was made')

  monkeypatch.setattr(tf.data.Dataset, '__iter__', no_data)
  dataset = _dataset(image_size=4096, batch_size=2048, num_classes=1000)
  assert dataset.element_spec.image == tf.TensorSpec(
    [2048, 4096, 4096, 3], tf.float32
  )
  assert dataset.element_spec.label == tf.TensorSpec([2048], tf.int32)
  assert dataset.element_spec.weight == tf.TensorSpec([2048], tf.float32)


def test_the_position_of_an_iterator_is_saved_without_images(tmp_path):
  fields = {'image_size': 64, 'batch_size': 32}
  data = iter(_dataset(**fields))
  for _ in range(3):
    next(data)
  path = tf.train.Checkpoint(data=data).write(str(tmp_path / 'position'))
  assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 50_000
  expected = [next(data).image.numpy() for _ in range(2)]
  fresh = iter(_dataset(**fields))
  tf.train.Checkpoint(data=fresh).read(path).assert_consumed()
  for image in expected:
    np.testing.assert_array_equal(next(fresh).image.numpy(), image)


def test_an_epoch_reads_all_files_once_with_their_folders_as_classes(tmp_path):
  _write(tmp_path, 'cat', range(0, 10), size=5)
  _write(tmp_path, 'dog', range(100, 111))  # 21 files, the 20th is held out.
  pattern = f'{tmp_path}/*/*.png'
  found, labels, weights = _take(_dataset(file_pattern=pattern), 10)
  values = _values(found)
  first, second = values[:20], values[20:]
  kept = [*range(0, 10), *range(100, 109), 110]
  assert sorted(first) == sorted(second) == kept
  assert first != second and first != kept
  np.testing.assert_array_equal(labels, np.array(values) >= 100)
  np.testing.assert_array_equal(weights, 1)
  again, _, _ = _take(_dataset(file_pattern=pattern), 10)
  np.testing.assert_array_equal(found, again)
  held_out = _take(_dataset(file_pattern=pattern, held_out=True), -1)
  assert _values(held_out[0]) == [109] * 4
  np.testing.assert_array_equal(held_out[2], [1, 0, 0, 0])


def test_several_patterns_read_a_file_once(tmp_path):
  _write(tmp_path, 'a', range(6))
  pattern = f'{tmp_path}/**/*.png,{tmp_path}/a/*'
  found, _, _ = _take(_dataset(file_pattern=pattern, batch_size=5), 1)
  assert sorted(_values(found)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
  'folders, message',
  [
    ([], 'file_pattern ".*" matches no file'),
    (['a'], 'file_pattern ".*" matches one file only'),
    (list('abcde'), 'in 5 folders.*num_classes is 4'),
  ],
)
def test_wrong_files_are_told(tmp_path, folders, message):
  for name in folders:
    _write(tmp_path, name, [1])
  with pytest.raises(errors.UserError, match=message):
    _dataset(file_pattern=f'{tmp_path}/*/*.png')
