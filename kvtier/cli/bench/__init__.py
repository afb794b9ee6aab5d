"""`kvtier bench`: an engine under load, on a virtual clock and a stated machine, or for real on this one.

command.py    its arguments, and what it does
loads.py      the load that they ask for
simulated.py  the load on a virtual clock
measured.py   the load, served by an engine of a model
report.py     what is printed and drawn
"""
