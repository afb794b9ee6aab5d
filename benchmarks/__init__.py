"""Measurements of kvtier compared with the caches of Transformers: `python -m benchmarks --list`."""

import warnings

# Transformers 5.24 calls it `cache`; the older name works with all.
warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)
