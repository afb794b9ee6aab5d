"""When a sequence ends, as `generate` would end it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from kvtier.errors import ConfigError

#: Criteria of Transformers' own whose answer needs no call.
_KNOWN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class Stopping:
    """The criteria of one sequence: those of its settings, and of the user's. One of a type that a setting makes takes
    the place of the setting, as in `generate`.

    Args:
        model: of Transformers.
        config: settings as `generate` has prepared them.
        given: criteria of the user's.
        prompt: tokens of the prompt.
        tokenizer: for stop strings.

    Raises:
        ConfigError: stop strings without a tokenizer.

    Attributes:
        max_length: tokens, those of the prompt included.
        is_timed: whether it ends after some time.
        criteria: those that are asked at each token.
        shared: of these, those that keep nothing of a sequence.
    """

    def __init__(
        self, model: Any, config: GenerationConfig, given: StoppingCriteriaList, prompt: int, tokenizer: Any
    ) -> None:
        if config.stop_strings and tokenizer is None:
            raise ConfigError("stop_strings need the engine's tokenizer.")
        config.stop_strings = config.stop_strings or None
        config.is_assistant = False  # how sure of a token an assistant is
        merged: list[Any] = model._get_stopping_criteria(config, given, tokenizer=tokenizer)
        lengths = [x.max_length for x in merged if type(x) is MaxLengthCriteria]
        timed = [x for x in merged if type(x) is MaxTimeCriteria]
        tokens = [x.eos_token_id.flatten().tolist() for x in merged if type(x) is EosTokenCriteria]
        self.max_length = max(math.ceil(min(lengths)), prompt + 1)  # criteria are asked behind the first token
        self.is_timed = bool(timed)
        # The time of a user's criterion runs since that was made, and the time of a setting from `start` on.
        theirs = [x for x in timed if any(x is each for each in given)]
        times = [x.initial_timestamp + x.max_time for x in theirs]
        self._until = min(times, default=math.inf) - time.time() + time.monotonic()
        self._seconds = min((x.max_time for x in timed if x not in theirs), default=math.inf)
        self._tokens = frozenset(x for each in tokens for x in each)
        self.criteria = [x for x in merged if type(x) not in _KNOWN]
        self.shared = [x for x in self.criteria if not any(x is each for each in given)]

    def asking(self, criteria: Sequence[Any]) -> Stopping:
        """The same for another sequence of the prompt, which has these criteria."""
        made = copy.copy(self)
        made.criteria = list(criteria)
        return made

    def start(self) -> None:
        """The time of the sequence runs from now on: a request is added."""
        self._until = min(self._until, time.monotonic() + self._seconds)

    def ends_at(self, token: int) -> bool:
        """Whether a token ends every sequence."""
        return token in self._tokens

    def criterion_ends(self, ids: Callable[[bool], torch.Tensor]) -> str:
        """Why one of the criteria ends a sequence: "stop", or "length" where it is about that or time; "": none does.

        Args:
            ids: the sequence `[1, tokens]`, on the host or where the model is, as the criterion takes it.
        """
        for each in self.criteria:
            on_host = type(each) is StopStringCriteria or getattr(each, "on_host", False)
            if bool(torch.as_tensor(each(ids(on_host), None)).any()):
                return "length" if isinstance(each, (MaxLengthCriteria, MaxTimeCriteria)) else "stop"
        return ""

    def is_over(self, length: int) -> bool:
        """Whether a sequence of so many tokens has its length, or its time is over."""
        return length >= self.max_length or time.monotonic() > self._until
