"""What Transformers calls a cache: `past_key_values` up to 5.23, `cache` from 5.24 on."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

#: The argument of `generate` and of models, and what they give it back under.
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
#: All that a caller may write.
ARGUMENTS = ("past_key_values", "cache", "cache_params")
