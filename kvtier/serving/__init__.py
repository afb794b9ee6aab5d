"""Many requests on one memory: the queue, the loop, and what runs a model for them.

request.py  `Request`: ids, state and events of one request; `RequestOutput`, what its user gets
prefixes.py `Prefixes`: what earlier requests have computed, for later ones to begin with
costs.py    `Costs`: what steps take, and so what preemption costs
requests.py `Requests`: which request waits, runs or has ended
batch.py    `Batch`: the prompts of one call, added as the queue has room
engine.py   `Engine`, which puts them together
replay.py   `replay`: a load on this machine's clock, and what became of it
text.py     tokens to text as they come, and stop strings in it
runners/    what runs the model: all tokens in one forward, or each sequence alone; and which one serves it
steps/      a step, and the loop that takes them
http/       the engine behind OpenAI's HTTP interface
"""
