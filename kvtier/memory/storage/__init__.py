"""The bytes of the tiers. It owns budgets, the slabs that are allocated under them, and which slots are free.

layout.py    the bytes of one block
system.py    what the host and the devices have free
slabs.py     budgets, and slabs allocated under them
pool.py      slots of one layout in one tier, in ranges
buffers.py   workspaces and pinned I/O buffers of attention
shortage.py  the errors for budgets that are too small

It knows no blocks and no threads: whoever calls holds the lock. Of `memory` it imports nothing else.
"""
