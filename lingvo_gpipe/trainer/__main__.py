"""Trains a model: `python -m lingvo_gpipe.trainer --model=... --logdir=...`."""

from absl import flags

from lingvo_gpipe import runtime

with runtime.quiet_tensorflow():
  from lingvo_gpipe.trainer import cluster_options, main, options

# So that --help shows them.
flags.adopt_module_key_flags(options)
flags.adopt_module_key_flags(cluster_options)

if __name__ == '__main__':
  main.run()
