"""Owns `TieredKVCache` and its layers: the Cache interface of Transformers, on a `Forward`.

cache.py      `TieredKVCache`
options.py    its options, and the memory that they are about
layer.py      `TieredLayer`: a layer whose blocks are in tiers
changes.py    `Changes`: what changes every layer, or none
resident.py   `ResidentLayers`: layers that stay Transformers' own
recurrent.py  `RecurrentStates`: states that a model changes in place, and the part of the cache that it sees for them
rows.py       arguments of `crop`, `reorder_cache` and the like
report.py     where each layer is, and why
missing.py    what a cache does not have, for whoever asks for it
copies.py     what a copy or a pickle of a cache holds

It imports `forward` and what that imports; of `hf` `models`, `callers` and `attention`. Blocks, slots and
copies are behind `Forward`.
"""
