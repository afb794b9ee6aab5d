"""Measuring the machine on request, and storing the values in its profile. Nothing here runs in a forward.

run.py        `kvtier.calibrate`: what is measured, in which order, progress, the result
job.py        one measurement
hardware.py   the measurements that make a `HardwareProfile`
disturbed.py  what something else on the machine disturbed, and what is kept in its place
timing.py     timing calls in turn on a machine that others use too
shapes.py     the shapes of a model's attention, from its config
measurements/ the parts of the profile, each in a module of its own

Owns the write side of `kvtier.profile`. May import everything below; only `kvtier` itself (lazily) and
benchmarks import it. A config is read by its attributes; a model is run with a cache of `hf`.
"""
