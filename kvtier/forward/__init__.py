"""One cache's forward: who runs it, what it was admitted with, what it fetches and when. It knows no bytes.

steps.py      the tracker of a forward: begun, interrupted, mixed by two threads
admission.py  what a step needs, and what is held between two: a claim for each device
schedule.py   the fetches of a step's plan, carried out layer by layer
planned.py    what forwards of a cache and of an engine have in common: the plan and the record of a step
held.py       `Held`: the layers of a cache: made, given back, and what they claim at rest
appending.py  `AppendingForward`: new tokens of a cache, admitted before anything changes, appended layer by layer
forward.py    `Forward`: the rest of what a cache does: attention, rows, parked sequences, its end
token.py      `NextToken`: one more token for one layer, in the middle of a step that decodes
packed.py     `PackedForward`: forwards of an engine, over any tokens of any sequences, packed end to end
sub_batch.py  `SubBatch`: what one forward of a packed step computes, and attention over it
"""
