"""Decode attention on host CPUs, over KV in host memory (Neo, section 3).

native.py    calls of the native library: attention, at once or on threads of its own
append.py    new tokens into blocks
merge.py     parts merged by log-sum-exp
blocks.py    what a call reads: shapes and runs of blocks
loader.py    finds, checks and loads the library; build.py compiles it from src/
fallback.py  the same in torch
checksum.py  checksums of blocks, and CRC-32
cached.py    what the system has of a file in memory, straight into host memory
"""
