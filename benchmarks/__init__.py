"""Measurements of kvtier beside the caches of Transformers: `python -m benchmarks --list`."""
