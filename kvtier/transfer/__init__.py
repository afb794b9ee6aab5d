"""How bytes move between the tiers. It owns streams, events and copies in flight, and imports no memory and no blocks.

copies.py    what moves: spans of blocks, joined where they are neighbours at both ends
engine.py    the seam: Transfer, TransferEngine, and inline copies for machines without an accelerator
cuda.py      copies on CUDA streams, ordered by events
launches.py  many short copies by one launch
doubles.py   test doubles: transfers that come late, in any order, or fail
throttled.py a double that takes the time of a link of a given speed, in the background
"""
