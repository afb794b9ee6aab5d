"""Everything that decides: numbers in, decisions out. No torch, no storage."""
