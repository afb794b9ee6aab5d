"""Eviction orders, one file each.

names.py        policies by name
lru.py          the longest unused first
lfu.py          the least often used first
second_use.py   what was never asked for again before all else
arc.py          ARC: recency and frequency, balanced by what was evicted too early
s3fifo.py       S3-FIFO: a small queue for what comes once, a large one for the rest
pensieve.py     Pensieve's score: size and idle time against the cost of getting it back (section 4.3)
adaptive.py     follows the best of some of these, as shadow caches on a sample of the keys
"""
