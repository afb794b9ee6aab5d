"""Decode attention on host CPUs, where the KV lies (Neo, section 3)."""
