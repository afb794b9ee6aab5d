"""Where blocks are, and the memory that they are in. It owns budgets, pools, moves and eviction; it knows no sequence.

storage/      bytes: what the machine has free, budgets, slabs, slots in them, buffers
access/       threads: the lock, changes that are cut short, readers outside the lock
blocks/       what is in the slots: runs of blocks, the one place that moves them, checksums of them
tiers/        the host tier, and compute devices with theirs: making room, eviction, fetches

owner.py      what a memory knows of one cache, or of one `ParkedSequences`
admission.py  whether the budgets hold what owners claim, when one claims more or a budget changes
limits.py     what budgets that are given as options are in bytes
usage.py      what the tiers hold, for statistics
integrity.py  whether everything that is counted twice agrees
recovery.py   `Recovery`: what dropped caches held, and everything made again after a change was cut short
measured.py   what is stored of a machine, for plans
tiered.py     `TieredMemory`, which puts them together

Each folder imports those above it, and none of the modules. Of kvtier all may import what stands before `memory` in
docs/architecture.md.
"""
