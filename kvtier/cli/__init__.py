"""The command line: `kvtier COMMAND` and `python -m kvtier COMMAND`.

main.py       the parser, and how errors and interrupts end
arguments.py  what arguments of several commands are read by
config.py     the config of a model that a command names
serve.py      `kvtier serve`: a model behind the HTTP interface of OpenAI
store.py      `kvtier store`: what a directory of conversations holds, and putting it in order
calibrate.py  `kvtier calibrate`: what this machine does in how many seconds, measured once
replay.py     `kvtier replay`: a logged run decided again, and compared
env.py        `kvtier env`: what kvtier finds on this machine

bench/        `kvtier bench`: an engine under load, on a virtual clock or measured
chat/         `kvtier chat`: a conversation in the terminal
plan/         `kvtier plan`: what fits where, and how fast, before anything is loaded

Owns nothing. Imports what a command needs when it runs.
"""
