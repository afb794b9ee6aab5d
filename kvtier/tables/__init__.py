"""The blocks of sequences. It owns lengths, tables and rows; where a block is, the memory says.

table.py    `BlockTable`: the blocks of one sequence in one layer, and its length
sharing.py  which rows of a batch share a table, and how many blocks new tokens take
writing.py  new tokens into open blocks
layer.py    `LayerKV`: one layer of one cache, rows pointing at tables
packed.py   `PackedLayerKV`: one layer of any number of sequences, each of its own length
parked/     sequences that no cache is adding to
"""
