"""Threads that share a memory. It owns the lock, the marks of changes under way, and who reads outside the lock.

lock.py     the lock, which is held by the thread that believes to hold it whatever comes
change.py   a change under the lock that was cut short is known to be
readers.py  attention calls that read outside the lock, and what holds slots until they have ended

Of `memory` it imports `storage`, for what a slot waits for (`Fence`).
"""
