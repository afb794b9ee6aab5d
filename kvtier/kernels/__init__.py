"""Attention kernels of the device in Triton, and the plain-torch reference that they are tested against.

paged.py    attention through block tables, and the merge of parts
copies.py   tokens into blocks, blocks into tensors, blocks across the link
tables.py   tables of addresses, and the same functions in plain torch
params.py   scale, masks and biases of a call; reference.py: attention and merge in plain torch
launch.py, forms.py, tiles.py      launches, what they are compiled for, and which tile they take
programs.py, copy_programs.py      the Triton programs
"""
