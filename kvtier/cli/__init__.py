"""The command line: `kvtier COMMAND` and `python -m kvtier COMMAND`.

main.py    the parser, and how errors and interrupts end
plan.py    `kvtier plan`: what fits where, and how fast, before anything is loaded
plot.py    its picture

Owns nothing. Imports what a command needs when it runs.
"""
