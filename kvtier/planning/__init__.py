"""Everything that decides: numbers in, decisions out. No torch, no memory, no clock of its own.

step.py       what a policy sees of a step before (`StepState`), decides (`StepPlan`) and gets afterwards (`StepRecord`)
policy.py     `Policy`: what is fetched and when, what stays, what is evicted and written back
admission.py  what a step needs, in bytes: for admission and for the error
sizing.py     sizes of slabs, workspaces and chunks
"""
