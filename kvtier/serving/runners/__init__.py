"""What runs a model for the sequences of an engine.

runner.py       `Runner`: what computes a step, and `Work`, a part of it
packed.py       `PackedRunner`: all tokens in one forward
ragged.py       `RaggedRunner`: those that decode in one forward, their recurrent states stacked
single.py       `SingleRunner`: each sequence alone
choice.py       which of them a model is run by, found out by trying
processes.py    `Processes`: those that a model is divided over, which compute the same steps
turns.py        `Turns`: forwards in one thread that pause for each other, as greenlets
sub_batches.py  `SubBatches`: which rows of a step are computed, and by how many forwards
"""
