"""Attention over a layer's KV.

calls.py     what a model asks for, and which way it goes
plans.py     where a layer's blocks lie, kept up to date
split.py     few queries: host threads and the device read the blocks where they lie, and the parts are merged
streamed.py  many queries: the layer passes through a bounded workspace, and the parts are merged
"""
