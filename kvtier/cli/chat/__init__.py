"""`kvtier chat`: a conversation in the terminal.

command.py   its arguments, and a chat with a model of this process
remote.py    the same with a server, `kvtier chat --url`
lines.py     lines from the terminal, each a message or a command
screen.py    what it shows, and Ctrl-C
"""
