"""Text as windows of bytes, in an order that can be resumed."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import errors
from lingvo_gpipe.inputs import byte_text


def _dataset(**fields):
  p = byte_text.ByteTextInput.Params().Set(
    name='input', random_seed=1, batch_size=4, sequence_length=8, **fields
  )
  return p.Instantiate().datasource.GetDataset()


def _write(folder, *texts):
  for j, text in enumerate(texts):
    (folder / f'{j:02d}.txt').write_bytes(text)
  return str(folder / '*.txt')


def _sequences(dataset, num_batches):
  """Returns the texts of the windows, without padding."""
  found = []
  for batch in dataset.take(num_batches):
    for ids, weights in zip(
      batch.ids.numpy(), batch.weights.numpy(), strict=True
    ):
      found.append(bytes(ids[weights > 0].astype(np.uint8)))
  return found


def test_an_epoch_reads_all_text_once(tmp_path):
  # 60 bytes make 8 windows, the last of 3 bytes and padding.
  texts = [bytes(range(j, j + 60)) for j in (0, 60, 120)]
  pattern = _write(tmp_path, *texts)
  found = _sequences(_dataset(file_pattern=pattern), 4)  # 2 of 3 files.
  assert len(found) == len(set(found)) == 16
  joined = sorted(b for window in found for b in window)
  assert joined == sorted(texts[0][:-1] + texts[1][:-1])


def test_labels_are_the_next_bytes_and_padding_weighs_nothing(tmp_path):
  # Each file makes a window of 8 bytes and one of 3; one file is held out.
  pattern = _write(tmp_path, b'abcdefghijkl', b'ABCDEFGHIJKL', b'zz')
  [batch] = _dataset(file_pattern=pattern).take(1)
  assert sorted(map(chr, batch.ids.numpy()[:, 0])) == ['A', 'I', 'a', 'i']
  for ids, labels, weights in zip(
    batch.ids.numpy(), batch.labels.numpy(), batch.weights.numpy(), strict=True
  ):
    n = 8 if chr(ids[0]) in 'aA' else 3
    np.testing.assert_array_equal(weights, np.arange(8) < n)
    np.testing.assert_array_equal(labels[:n], ids[0] + 1 + np.arange(n))


def test_held_out_files_are_others_and_end(tmp_path):
  texts = [bytes([65 + j]) * 40 for j in range(25)]
  pattern = _write(tmp_path, *texts)
  train = _sequences(_dataset(file_pattern=pattern), 40)
  held_out = _sequences(_dataset(file_pattern=pattern, held_out=True), -1)
  letters = {w[:1] for w in held_out if w}
  assert letters == {bytes([65 + 19])}
  assert not letters & {w[:1] for w in train}


def test_a_single_file_gives_its_end_to_evaluation(tmp_path):
  pattern = _write(tmp_path, bytes(range(200)))
  held_out = _sequences(_dataset(file_pattern=pattern, held_out=True), -1)
  assert b''.join(held_out) == bytes(range(190, 199))


def test_epochs_are_shuffled_differently_and_seeds_matter(tmp_path):
  pattern = _write(tmp_path, bytes(range(250)), b'xx')
  windows = _sequences(_dataset(file_pattern=pattern), 16)
  first, second = windows[:32], windows[32:]
  assert sorted(first) == sorted(second)
  assert first != second
  again = _sequences(_dataset(file_pattern=pattern), 16)
  assert again == windows


def test_the_position_of_an_iterator_is_saved(tmp_path):
  data = iter(_dataset())
  for _ in range(5):
    next(data)
  path = tf.train.Checkpoint(data=data).write(str(tmp_path / 'position'))
  expected = [next(data).ids.numpy() for _ in range(3)]
  fresh = iter(_dataset())
  tf.train.Checkpoint(data=fresh).read(path).assert_consumed()
  for ids in expected:
    np.testing.assert_array_equal(next(fresh).ids.numpy(), ids)


@pytest.mark.parametrize(
  'texts, message',
  [
    ([], 'matches no file'),
    ([b'', b''], 'empty or too short'),
    ([b'0123456789', b'0123456789'], 'makes only 2 sequences of 8 bytes'),
  ],
)
def test_too_little_text_is_told(tmp_path, texts, message):
  pattern = _write(tmp_path, *texts)
  with pytest.raises(errors.UserError, match=message):
    _dataset(file_pattern=pattern)
