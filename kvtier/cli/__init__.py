"""The command line: `kvtier COMMAND` and `python -m kvtier COMMAND`.

main.py    the parser, and how errors and interrupts end
plan.py    `kvtier plan`: what fits where, and how fast, before anything is loaded
plot.py    its picture
chat.py    `kvtier chat`: a conversation in the terminal
screen.py  what it shows, and Ctrl-C
store.py   `kvtier store`: what a directory of conversations holds, and putting it in order

Owns nothing. Imports what a command needs when it runs.
"""
