"""`kvtier plan`: what of a model's KV fits where on a machine, and the tokens per second to expect.

command.py   its arguments, and what it does
planned.py   `Planned`: the model, the machine, the budgets, and how long a context may be
report.py    what is printed: a table, or JSON
plot.py      the picture
"""
