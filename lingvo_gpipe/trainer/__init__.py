"""The trainer binary: `python -m lingvo_gpipe.trainer --help`."""
