"""Sweeps: studies of settings, each a file for `python -m launch.sweep`."""
