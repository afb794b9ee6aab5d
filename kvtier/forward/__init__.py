"""One cache's forward: who runs it, what it was admitted with, what it fetches and when. It knows no bytes.

steps.py      the tracker of a forward: begun, interrupted, mixed by two threads
admission.py  what the step needs, asked of the memory
schedule.py   the fetches of a step's plan, carried out layer by layer
forward.py    `Forward`: updates and attention in their order
"""
