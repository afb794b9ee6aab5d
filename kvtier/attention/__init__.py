"""Attention over a layer's KV, wherever its blocks are.

partition.py  which block is on the device, arriving there, or on the host, as kernels find it
reader.py     `LayerReader`: how attention reads one layer, and what it keeps from call to call
split.py      few queries: each part is attended in place, and the parts are merged
call.py       one call over the blocks of one part: on the device, or by CPU threads
host_part.py  the host's part: the query comes down, CPU threads attend, the result goes up
streaming.py  many queries: the layer passes through a bounded workspace, and the parts are merged
dense.py      a layer as tensors: in the workspace, or of the caller's own
tangents.py   what forward-mode AD may ask of it
dispatch.py   what a model asks for, and which of these ways it goes
repeat.py     `Repeat`: a decode call like the layer's last one, made again
"""
