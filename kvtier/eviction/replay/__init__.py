"""Policies on traces, in virtual time: traces, one tier, the offline bound, several tiers. No store imports it."""
