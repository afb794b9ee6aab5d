"""What of a conversation's prefix is kept, loaded, recomputed or attended to on the host when it goes on.

prefix.py    a prefix, prices, and a plan for it: data
resume.py    the decision
loading.py   the decision for a prefix that is saved on a disk
simulate.py  many conversations that go on at once, on a virtual clock
"""
