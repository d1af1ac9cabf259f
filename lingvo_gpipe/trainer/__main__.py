"""Trains a model: `python -m lingvo_gpipe.trainer --model=... --logdir=...`."""

from absl import flags

from lingvo_gpipe import runtime

with runtime.quiet_tensorflow():
  from lingvo_gpipe.trainer import main, options

flags.adopt_module_key_flags(options)  # So that --help shows them.

if __name__ == '__main__':
  main.run()
