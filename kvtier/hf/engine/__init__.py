"""Owns what `serving` needs of Transformers and has in no other form: caches for an engine's forwards, and sampling.

packed.py    `PackedCache`: the cache of one packed forward
ragged.py    `RaggedCache`: the same with a row for each segment, for models with recurrent states
copies.py    processors and criteria of users, one for each sequence
settings.py  which settings of `generate` an engine honours, and what each may be
stopping.py  `Stopping`: when a sequence ends
sampling.py  `Sampling`: how a request's tokens are chosen, as `generate` chooses them

It imports `forward`, and of `hf` `models` and `attention`. It knows no requests.
"""
