"""What a store keeps on the disk: a folder of files of tensors, and a manifest that says what they are.

disk.py       `Disk`: the folder, for a store and any threads
reading.py    `ChainReader`: the tensors of a chain of chunks, part by part
writing.py    `Writer`: how a chunk is saved: room, a file, a row
recovery.py   `Recovery`: what is there, as rows and files say when the folder is opened or a change was cut short
room.py       `Room`: the budget, and what goes where it is reached
order.py      `Order`: which chunks go first, by rank and use
ranked.py     `Ranked`: a conversation with a rank of its own, and where its saved history ends
chunks.py     `Chunks`: what is there, found by token ids
keys.py       what keys and values depend on besides tokens, as text

files/        the folder, its lock, and files of tensors
rows/         the manifest: a database of chunks and conversations
tools/        `kvtier store`: what a folder holds, upkeep, copies

Owns the format, the checksums and the order of writes: whatever is damaged or incomplete is found, and used by nobody.
May import `index`; knows no cache and no model.
"""
