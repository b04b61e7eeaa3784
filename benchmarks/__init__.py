"""Benchmarks: run them as modules from the repository's folder, such as `python -m benchmarks.baseline`."""
