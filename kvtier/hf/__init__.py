"""Where kvtier meets Transformers: the only folder that imports it, but for the server that `serving/http` imports."""
