"""Conversations: token ids are kept with their keys and values, so that whatever a call begins with is re-used if it is
valid, and nothing else (Pensieve, section 4).

Owns the journal of token ids, the index of prefixes and the copies of states that only hold for one position. Knows how
a cache is made and read, and neither slots nor transfers.
"""
