"""What callers give: checked, or refused with the reason.

arguments.py    names, salts, ids, counts, budgets, messages
prompts.py      `Prompts`: messages, tools and what else a chat template reads -> token ids
"""
