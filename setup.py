"""Packaging: `pip install -e .` or, for the tests, `pip install -e .[test]`."""

import setuptools

# The spmd engine's compilers; newer versions have not been tried.
_TPU = ['jax==0.10.0', 'jaxlib==0.10.0', 'libtpu==0.0.40']

setuptools.setup(
  name='lingvo_gpipe',
  version='0.1.0',
  description='Pipeline-parallel training of giant networks on Lingvo.',
  python_requires='>=3.10,<3.14',
  # The experiments live at the top of the repository and install inside the
  # package, where Lingvo's rule for model names finds them.
  packages=['lingvo_gpipe']
  + [f'lingvo_gpipe.{p}' for p in setuptools.find_packages('lingvo_gpipe')]
  + ['lingvo_gpipe.params']
  + [f'lingvo_gpipe.params.{p}' for p in setuptools.find_packages('params')],
  package_dir={'lingvo_gpipe.params': 'params'},
  install_requires=[
    'absl-py>=2.1',
    'lingvo>=0.14.2',
    'matplotlib>=3.8',
    'tensorflow>=2.21',
    'tqdm>=4.66',
  ],
  extras_require={
    'tpu': _TPU,
    'test': [*_TPU, 'pytest>=8', 'pytest-xdist>=3.6', 'ruff>=0.17,<0.18'],
  },
)
