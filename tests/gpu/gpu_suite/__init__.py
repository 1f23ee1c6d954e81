"""The checks and measurements of tests/gpu/run.sh."""
