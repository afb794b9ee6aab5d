"""Whether keys and values that were computed once are those that a model computes now, for the same tokens.

dependence.py   `Depends`: what keys and values depend on besides tokens
written.py      `Numbers`: whether a tensor may have been written to
fingerprint.py  what saved keys and values are bound to: the class, config, weights and buffers of their model

The first two answer within a process, the last one across processes. Of `hf.models` it imports `generation`.
"""
