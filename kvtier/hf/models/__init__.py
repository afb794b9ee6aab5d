"""Owns what kvtier knows of a model and its config. Nothing here holds keys and values, or looks at who calls.

names.py       what Transformers calls a cache
layers.py      the layers of a model's cache, and whether a cache fits a model
generation.py  what `generate` is told, and what is known of a model before it is asked
trials.py      what is computed to find out what a model does
rotary.py      `Stretched`: frequencies that depend on how long a sequence was
positions.py   how many positions a model has, and whether there are more
devices.py     `Devices`: where the layers of a model are

checkpoint/    what its files say: config, weights, tokenizer, chat template
identity/      whether keys and values that were computed once are those that it computes now

It imports nothing else of `hf`; of kvtier only what knows no caches, such as `errors` and `cpu`.
"""
