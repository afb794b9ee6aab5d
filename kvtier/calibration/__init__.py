"""Measuring the machine on request, and storing the values in its profile. Nothing here runs in a forward.

run.py      `kvtier.calibrate`: what is measured, in which order, progress, the result
shapes.py   the shapes of a model's attention, from its config
tiles.py    the tiles of paged attention
copies.py   from how many short runs on a launch copies faster than the copy engine

Owns the write side of `kvtier.profile`. May import kernels, memory and transfer; only `kvtier` itself (lazily) and
benchmarks import it. Transformers is not imported: a config is read by its attributes.
"""
