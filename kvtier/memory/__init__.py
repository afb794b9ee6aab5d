"""Where blocks are, and the memory that they are in. It owns budgets, pools, moves and eviction; it knows no sequence.

layout.py     the bytes of one block
slabs.py      budgets, and slabs allocated under them
system.py     what the host and the devices have free
pool.py       slots of one layout in one tier, in ranges
block.py      states of blocks, the runs in which they move, the sets in which they are counted
residency.py  the one place that moves a block, and its transition table
reclaim.py    defragmentation: slabs become free bytes, free slots become neighbours
change.py     a change under the lock that was cut short is known to be
buffers.py    workspaces and pinned I/O buffers of attention
lock.py       the lock, which is held by the thread that believes to hold it whatever comes
readers.py    attention calls that read outside the lock
host.py, device.py   the host tier; a compute device with its tier: making room, eviction, fetches
owner.py      what a memory knows of one cache, or of one `ParkedSequences`
audit.py      whether blocks in host memory still hold what was written
integrity.py  whether everything that is counted twice agrees
recovery.py   everything made again from the runs, after a change was cut short
shortage.py   the errors for budgets that are too small
usage.py      what the tiers hold, for statistics
measured.py   what is stored of a machine, for plans
tiered.py     `TieredMemory`, which puts them together
"""
