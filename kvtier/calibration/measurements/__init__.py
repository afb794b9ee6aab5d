"""What is measured of a machine: one module for each part of its profile.

link.py      copies between the tiers
copies.py    from how many short runs on a launch copies faster than the copy engine
attention.py attention on the host and on the device
tiles.py     the tiles of paged attention
model.py     a model's layers and its prefill
"""
