"""What a user is told of decisions. Reads policies and records, and decides nothing.

analysis.py  what binds a step, and what would change it
explain.py   that and all else that `cache.explain()` says, as a string
trace.py     what took time, as a file that opens in Perfetto
log.py       the decision log, and its replay
"""
