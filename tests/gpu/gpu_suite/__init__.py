"""Checks and measurements of tests/gpu/run.sh."""
