"""What is saved, and when it comes back: sequences wait for a thread that saves them, are loaded for a call, in its
background, or before it.

Owns these threads and what waits for them. May import what is kept and the disk; knows nothing of what calls ask for.
"""
