"""The policies that have names. One more is a file here and a line in names.py; `examples/policy.py` shows one.

names.py     policies by name
shares.py    `FixedShare`: one share of what is spilled is fetched
adaptive.py  `Adaptive`: which share, priced by what steps take
learner.py   `ShareLearner`: the share for one cache, learned from what its steps take
pie.py       `WholeLayers`: Pie's swapping of whole layers as plans of steps, to compare with
rotation.py  Pie's rotation of whole layers on a clock of its own, as the paper has it
neo.py       `WholeSequences`: each sequence on one side, to compare with
"""
