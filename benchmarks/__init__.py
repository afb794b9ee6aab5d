"""Measurements of kvtier compared with the caches of Transformers: `python -m benchmarks --list`."""
