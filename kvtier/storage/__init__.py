"""Bytes and how they move: memory under a budget, pools of slots, blocks and tables, transfers. No opinions here."""
