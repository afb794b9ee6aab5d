"""Owns what kvtier knows of a model and its config. Nothing here holds keys and values, or looks at who calls.

names.py       what Transformers calls a cache
layers.py      the layers of a model's cache, and whether a cache fits a model
config.py      the config of a decoder, by name or as a file has it
generation.py  what `generate` is told, and what is known of a model before it is asked
dependence.py  `Depends`: what keys and values depend on besides tokens
trials.py      what is computed to find out what a model does
rotary.py      `Stretched`: frequencies that depend on how long a sequence was
positions.py   how many positions a model has, and whether there are more
fingerprint.py what saved keys and values are bound to
devices.py     `Devices`: where the layers of a model are
written.py     `Numbers`: whether a tensor may have been written to
weights.py     how many weights a config means
loading.py     a model and its tokenizer, by name
templates.py   a chat template, the variables that it reads, and who renders it

It imports nothing else of `hf`; of kvtier only what knows no caches, such as `errors` and `cpu`.
"""
