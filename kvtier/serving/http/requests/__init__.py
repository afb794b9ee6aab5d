"""What is read of a request: who is asking, and what. Each part is honoured, or refused with the reason.

refusals.py     `Refusal`: what is refused, and how that is said
keys.py         API keys, and the salt of each; a client's visit
asked.py        `Asked`: a body -> what is asked
messages.py     prompts and messages of a body
settings.py     settings of generation: what is refused of them
grammars.py     `Grammars`: JSON schemas that answers are held to
lengths.py      texts that cannot fit into the context, before all of them is tokenised

It imports nothing of the app or of the engine.
"""
