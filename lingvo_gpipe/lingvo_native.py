"""Makes Lingvo importable where its native library cannot load.

Lingvo ships `lingvo/core/ops/x_ops.so`, which needs glibc 2.38; on older
systems (Debian 12, Ubuntu 22.04) nearly every Lingvo module fails to import.
Before it loads the library, Lingvo tries `from lingvo.core.ops import
gen_x_ops`. This file answers that import, and only where the library does not
load:

    import lingvo.core.ops
      -> asks for gen_x_ops -> x_ops.so loads?  yes: step aside
                                                no:  a module of plain-TF ops

The two assertions that layers use are written in plain TensorFlow; every other
native op (decoders, tokenizers, record readers) explains itself when called.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

_MODULE = 'lingvo.core.ops.gen_x_ops'


def install() -> None:
  """Registers the fallback; does nothing if it is registered already."""
  if not any(isinstance(f, _FallbackFinder) for f in sys.meta_path):
    sys.meta_path.append(_FallbackFinder())


class _FallbackFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Offers `gen_x_ops` when `x_ops.so` cannot be loaded."""

  def find_spec(self, fullname, path=None, target=None):
    if fullname != _MODULE or _native_library_error(path) is None:
      return None
    return importlib.machinery.ModuleSpec(fullname, self)

  def create_module(self, spec):
    module = types.ModuleType(spec.name, __doc__)
    module.assert_shape_match = _assert_shape_match
    module.assert_same_dim0 = _assert_same_dim0
    module.__getattr__ = _missing_op
    return module

  def exec_module(self, module):
    pass


def _native_library_error(package_path) -> Exception | None:
  """Returns why `x_ops.so` does not load, or None if it does."""
  import tensorflow as tf

  library = os.path.join(next(iter(package_path)), 'x_ops.so')
  try:
    tf.load_op_library(library)
  except tf.errors.NotFoundError as error:
    return error
  return None


def _assert_shape_match(x, y, msg='', name=None):
  """Asserts that shapes `x` and `y` ([rank], int) agree where both are >= 0."""
  import tensorflow as tf

  x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
  with tf.control_dependencies(
    [tf.debugging.assert_equal(tf.size(x), tf.size(y), msg)]
  ):
    agree = tf.reduce_all(tf.equal(x, y) | (x < 0) | (y < 0))
  return tf.debugging.Assert(agree, [msg, x, y], name=name)


def _assert_same_dim0(x, msg='', name=None):
  """Asserts that all tensors of the list `x` have the same first dimension."""
  import tensorflow as tf

  first_dims = tf.stack([tf.shape(t)[0] for t in x])
  agree = tf.reduce_all(tf.equal(first_dims, first_dims[0]))
  return tf.debugging.Assert(agree, [msg, first_dims], name=name)


def _missing_op(name):
  if name.startswith('__'):
    raise AttributeError(name)

  def op(*unused_args, **unused_kwargs):
    raise NotImplementedError(
      f'Lingvo\'s native op "{name}" is not available: x_ops.so needs '
      'glibc 2.38 or newer. Run on a newer system or avoid this op.'
    )

  op.__name__ = name
  return op
