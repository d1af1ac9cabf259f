"""Trains a model: `python -m lingvo_gpipe.trainer --model=... --logdir=...`."""

from lingvo_gpipe import runtime

with runtime.quiet_tensorflow():
  from lingvo_gpipe.trainer import main

if __name__ == '__main__':
  main.run()
