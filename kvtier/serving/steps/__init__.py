"""What a step of an engine does, and what it takes.

step.py      `StepRunner`: a step, from the scheduler's plan to the tokens
costs.py     `Costs`: what steps take, and so what preemption costs
processes.py `Processes`: those that a model is divided over, which compute the same steps
"""
