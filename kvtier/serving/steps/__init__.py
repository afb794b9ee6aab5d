"""What an engine does: steps, and the loop that takes them.

step.py `StepRunner`: a step, from the scheduler's plan to the tokens
loop.py `Loop`: steps in a thread of its own, or in whoever asks for one
"""
