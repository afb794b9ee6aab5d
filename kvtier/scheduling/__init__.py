"""Which requests a step works on: plain Python, numbers in and decisions out. It knows no tensor, no model, no thread.

job.py        `Job`, `Load`, `Step`: what a scheduler sees and says
scheduler.py  `Scheduler`: the budget of a step, admission, preemption; whoever ranks jobs otherwise subclasses it
fcfs.py       first come, first served
fair.py       the longest wait for the least work first
names.py      schedulers by name
prices.py     how a job that gives up its blocks comes back, swapped or recomputed, and what that costs
shares.py     what tenants were served
log.py        what a scheduler was asked and what it answered, and its replay
simulation/   a model of an engine on a virtual clock, with these schedulers
"""
