"""The command line: `kvtier COMMAND` and `python -m kvtier COMMAND`.

main.py      the parser, and how errors and interrupts end
plan.py      `kvtier plan`: what fits where, and how fast, before anything is loaded
plot.py      its picture
chat.py      `kvtier chat`: a conversation in the terminal
lines.py     lines from the terminal, each a message or a command
screen.py    what it shows, and Ctrl-C
remote.py    the same with a server, `kvtier chat --url`
serve.py     `kvtier serve`: a model behind the HTTP interface of OpenAI
bench.py     `kvtier bench`: an engine under load, on a virtual clock
store.py     `kvtier store`: what a directory of conversations holds, and putting it in order
calibrate.py `kvtier calibrate`: what this machine does in how many seconds, measured once
replay.py    `kvtier replay`: a logged run decided again, and compared
env.py       `kvtier env`: what kvtier finds on this machine

Owns nothing. Imports what a command needs when it runs.
"""
