"""Runs a schedule."""
