"""Experiments, by Lingvo's rule for names: `--model=lm.byte_lm.Tiny`."""
