"""An engine behind the HTTP interface of OpenAI: Transformers' own server app, with parts of ours.

front.py        the door, around the app: who is asking, sizes, clients that leave
app.py          Transformers' app with our handlers, and what else it has
requests/       what is read of a request: who is asking, and what; every field is honoured or refused
handlers/       what is asked -> prompts; parts of answers -> the wire
answers.py      requests of the engine -> parts of an answer
parsing.py      what a model writes -> text, thoughts, calls of tools
manager.py      what Transformers' app asks for generation; requests to the engine, tokens back
sessions.py     conversations that clients go on with, and when each was used last
metrics.py      what is counted, in Prometheus' format
server.py       the model, the store, the engine, the port; clients that do not read; the end

The only folder besides `hf/` that imports transformers, and of it only its server. fastapi, uvicorn and openai are
installed by `pip install 'kvtier[serve]'`, and imported when a server is made.
"""
