"""Owns `TieredKVCache` and its layers: the Cache interface of Transformers, on a `Forward`.

cache.py     `TieredKVCache`
layer.py     `TieredLayer`: a layer whose blocks are in tiers
resident.py  layers that stay Transformers' own, and recurrent states, which a model changes in place
rows.py      arguments of `crop`, `reorder_cache` and the like

It imports `forward` and what that imports; of `hf` `models`, `callers` and `attention`. Blocks, slots and
copies are behind `Forward`.
"""
