"""What a folder knows of itself, in an SQLite database: rows of chunks, and of conversations.

manifest.py       `Manifest`: the database, its layout and its transactions
commits.py        `Commits`: how many commits it has had, so that an older one is told from it
conversations.py  `ConversationRows`: what conversations are
pieces.py         lists that grow with each turn, in pieces
"""
