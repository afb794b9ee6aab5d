"""The tiers. They own pools, transfer engines, and how room is made: evictions, fetches, slots that are given up.

host.py      the host tier, which all devices share
tier.py      what there is where one device attends: pools, sets of blocks, what their slots wait for
eviction.py  the way down, and copies made ahead of it
room.py      slots and bytes, the cheapest way first
fetching.py  the way up, ahead of use or for good
device.py    `ComputeDevice`, which puts these together, and new blocks

They know no owner and no budget but their own. Of `memory` they import `storage`, `access` and `blocks`.
"""
