"""The tiers. They own pools, transfer engines, and how room is made: evictions, fetches, slots that are given up.

host.py    the host tier, which all devices share
device.py  a compute device with its tier

They know no owner and no budget but their own. Of `memory` they import `storage`, `access` and `blocks`.
"""
