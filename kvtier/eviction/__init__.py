"""Which kept blocks are evicted first: plain Python, events and a clock in, blocks out. It imports `errors` only.

policy.py   `EvictionPolicy`: what is told of blocks, and which go first
tree.py     `PrefixTree`: the kept blocks of a tier, and which continue which
rank.py     `Rank`: what a conversation is worth: pinned, priority, time to live
policies/   one file each, and their names
replay/     traces, replayed on one tier and on several, and the best possible
"""
