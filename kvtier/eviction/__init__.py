"""Which kept blocks are evicted first: plain Python, events and a clock in, blocks out. It imports `errors` only."""
