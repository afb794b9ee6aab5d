"""Where kvtier meets Transformers: the only folder that imports it, but for the server that `serving/http` imports.

A folder imports what stands before it here, and never what stands behind it:

models/     what a model and its config say: the layers of its cache, what its keys and values depend on, its weights
callers/    what the call stack says: which model updates a cache, which threads are in it, which prompt comes
attention/  how attention reaches kvtier: views instead of tensors, and implementations that know them
cache/      `TieredKVCache`, its tiered layers, and those of Transformers that stay as they are
wrapper/    `tiered`, `tier` and `untier`: a cache for every `generate` of a model
engine/     what an engine needs of Transformers: caches for its forwards, and sampling
"""
