"""Everything that decides: numbers in, decisions out. No torch, no memory, no clock of its own.

step.py       what a policy sees of a step before (`StepState`), decides (`StepPlan`) and gets afterwards (`StepRecord`)
policy.py     `Policy`: what is fetched and when, what stays, what is evicted and written back
names.py      policies by name
shares.py     `FixedShare`: one share of what is spilled is fetched
adaptive.py   `Adaptive`: which share, priced by what steps take
costs.py      seconds predicted from rates, and rates learned
profile.py    `HardwareProfile`: what a machine takes, measured or estimated
predictors.py seconds by bytes, threads and tokens, fitted from measurements
machines.py   machines and models by their datasheets
fit.py        least squares
simulate.py   a cache under a policy on a virtual clock
analysis.py   what binds a step, and what would change it
explain.py    that and all else that a user is told, as a string
trace.py      what took time, as a file that opens in Perfetto
prefix.py     a conversation's prefix, prices, and a plan for it: data
resume.py     what of a conversation's prefix is kept, loaded, recomputed or attended to on the host when it goes on
simulate_resume.py  many conversations that go on at once, on a virtual clock
rotation.py   Pie's swapping of whole layers, on a clock of its own
pie.py        `WholeLayers`: the same as plans of steps, to compare with
neo.py        `WholeSequences`: each sequence on one side, to compare with
sub_batches.py  which rows a step computes, and in one forward or in two that take turns
admission.py  what a step needs, in bytes: for admission and for the error
sizing.py     sizes of slabs, workspaces and chunks
"""
