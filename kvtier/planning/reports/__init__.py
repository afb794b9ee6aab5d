"""What a user is told of decisions. Reads policies and records, and decides nothing.

analysis.py  what binds a step, and what would change it
explain.py   that and all else that `cache.explain()` says, as a string
trace.py     what took time, as a file that opens in Perfetto
log.py       the log of a policy's decisions, and its replay
log_file.py  the file of a log, and how answers compare
"""
