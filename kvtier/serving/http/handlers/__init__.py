"""What the app calls for each kind of request: what is asked -> prompts; parts of answers -> the wire.

handler.py      what they share: the model that is served, prompts, streams
chat.py         chat completions
completions.py  completions
responses.py    responses
items.py        items of a response, and the events that tell of them
"""
