"""Everything that decides: numbers in, decisions out. No torch, no memory, no clock of its own.

step.py         what a policy sees of a step before (`StepState`), decides (`StepPlan`) and gets after (`StepRecord`)
policy.py       `Policy`: what is fetched and when, what stays, what is evicted and written back
rates.py        `Rates` of a machine, and the median by which they are learned
costs.py        `CostModel`: seconds of a step predicted from rates, and rates learned from steps
fit.py          least squares
admission.py    what a step needs, in bytes: for admission and for the error
sizing.py       sizes of slabs, workspaces and chunks
sub_batches.py  which rows a step computes, and in one forward or in two that take turns

makespan/       what the seconds of a step are made of
hardware/       what a machine takes for everything that a plan is made of, and how large models are
policies/       the policies that have names
resuming/       what of a conversation's prefix is kept, loaded, recomputed or attended to on the host when it goes on
simulation/     a cache under a policy on a virtual clock
reports/        what a user is told: analysis, explanation, traces, decision logs, the outlook of a plan
"""
