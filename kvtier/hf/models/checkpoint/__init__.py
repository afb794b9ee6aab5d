"""What a checkpoint's files say of a model, before it computes: its config, its weights, its tokenizer's template.

config.py     the config of a decoder, by name or as a file has it
weights.py    how many weights a config means
loading.py    a model and its tokenizer, by name
templates.py  a chat template, the variables that it reads, and who renders it

A checkpoint is a folder, or a name on the model hub. Of `hf.models` it imports `layers`.
"""
