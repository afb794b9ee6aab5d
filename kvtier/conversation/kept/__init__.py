"""What is kept in memory: which sequence has which ids, copies of states, and what goes first where room is needed.

Owns the sequences that are parked, their entries and the ranks of conversations. May import `index`, `journal` and
`states`. Knows neither calls nor the disk.
"""
