"""A model of an engine on a virtual clock, with the schedulers that the real one has.

loads.py      requests of traces and of random loads
profile.py    `Profile`: what steps take
outcome.py    `Request`, and what became of it: `Served`, `Outcome`
simulate.py   `Simulation`: steps of an engine, and when each request ends
hosted.py     the same where sequences decode on the host when the device has no room
trials.py     random loads on random machines: the way back by price against either way always
"""
