"""What is in the slots. It owns the states of blocks, the runs in which they move, and what is noted of their bytes.

block.py      states of blocks, the runs in which they move, the sets in which they are counted
residency.py  the one place that moves a block, and its transition table
reclaim.py    defragmentation: slabs become free bytes, free slots become neighbours
audit.py      whether blocks in host memory still hold what was written

It has no opinion about which block moves when. Of `memory` it imports `storage` and `access`.
"""
