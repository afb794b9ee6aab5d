"""Owns the ways on which attention of a model comes to kvtier: views, and entries among Transformers' implementations.

view.py       `KVView`: what stands for a layer's keys or values, and its answers to functions of torch
packed.py     the mask of a packed step, and attention under it
interface.py  the implementation "kvtier", and its mask
sdpa.py       the entry "sdpa", while there are tiered caches: a shorter way to views
enable.py     `enable` and `disable`: which models' attention goes through kvtier
dynamo.py     what `torch.compile` must leave alone

It imports `forward`, `attention` and what these import, and nothing else of `hf`. It knows no caches.
"""
