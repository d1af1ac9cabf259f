"""Compiles the spmd engine's program by XLA itself, without TensorFlow.

Needs the extra `tpu`: jaxlib, which has XLA's clients, and libtpu, which has
the compiler for TPUs and needs none to compile for one.
"""
