"""Owns the looks at the call stack: the Cache API does not say who calls.

threads.py    where the threads are that use a cache
caller.py     `Caller`: the model that updates a cache, and in which form it reads a layer's KV
histories.py  what a cache holds against the prompt of the `generate` under way

It imports `hf/models`, and of `forward` its tracker. It changes nothing that it looks at.
"""
