"""One process-wide set-up for all tests: eight virtual CPU devices."""

from lingvo_gpipe import runtime

runtime.configure(num_cpu_devices=8)
