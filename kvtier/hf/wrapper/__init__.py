"""Owns what of Transformers is wrapped while a model is tiered, and the calls of `generate` that come by.

tiering.py  `tiered`, `tier` and `untier`

It imports `hf/cache` and what that imports. Its design: docs/design/wrapper.md.
"""
