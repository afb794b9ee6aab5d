"""Where kvtier meets Transformers: the only folder that imports it."""
