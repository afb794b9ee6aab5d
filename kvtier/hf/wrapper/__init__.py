"""Owns what of Transformers is wrapped while a model is tiered, and the calls of `generate` that come by.

call.py      `Call`: one call of `generate`, and what becomes of its caches
wrapping.py  which models are tiered, and the methods that are wrapped meanwhile
tiering.py   `tiered`, `tier`, `untier`, and `Tiered`, which they give

It imports `hf/cache` and what that imports. Its design: docs/design/wrapper.md.
"""
