"""Policies on a virtual clock, with the objects that serve a real cache.

simulate.py  a cache under a policy, on a machine and a load that are numbers
bound.py     seconds that no policy can do without
trials.py    random machines and loads, and how a policy does in them
outlook.py   what a model on a machine is expected to do, before anything is loaded
"""
