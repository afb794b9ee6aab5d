"""Sequences that no cache is adding to. It owns their tables, and which of them leaves the device or is dropped first.

sequence.py   `ParkedSequence`, and the parked blocks of one layer
on_device.py  which of them have blocks on a device: the way down and up
sequences.py  `ParkedSequences`: park, continue, give up

Of `tables` it imports `table` and `layer`.
"""
