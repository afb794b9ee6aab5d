"""Conversations: token ids are kept with their keys and values, so that whatever a call begins with is re-used if it is
valid, and nothing else (Pensieve, section 4).

`kept` owns what is in memory, `disk` the files, `saved` what goes from one to the other, `calls` one call of
`generate`. The modules here are what these stand on (token ids and their index, caches with a journal of them, copies
of states) and what is put together of them: conversations, their names, the store. docs/architecture.md has the order
in which they import each other. May import `hf` and all that it stands on; knows how a cache is made and read, and
neither slots nor transfers.
"""
