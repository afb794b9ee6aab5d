"""Settings of generation as clients give them: what is refused of them, and what Transformers has no name for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvtier.hf.engine.settings import token_by_token
from kvtier.serving.http.requests.asked import Asked
from kvtier.serving.http.requests.refusals import invalid

#: Settings that hold token ids, and those that are of sampling, with what leaves each out.
_OF_TOKENS = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "suppress_tokens",
)
_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "min_p": (None, 0, 0.0),
    "temperature": (None, 1, 1.0),
    "top_h": (None,),
    "top_k": (None, 0),
    "top_p": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
}


def check_settings(settings: Mapping[str, Any], samples: bool, vocabulary: int | None, own: Any) -> None:
    """Refuse what no step could do, or what would change nothing.

    Args:
        settings: of a request.
        samples: whether it does.
        vocabulary: of the model; None: not known.
        own: the model's generation config, which is no fault of the request's.

    Raises:
        Refusal: says which, and why.
    """
    for name in _OF_TOKENS:
        value = settings.get(name)
        if vocabulary is None or value == getattr(own, name, None):
            continue
        least = -1 if name == "eos_token_id" else 0  # no token, by which no answer ends
        wrong = next((x for x in _ids_in(value) if not least <= x < vocabulary), None)
        if wrong is not None:
            name = "logit_bias" if name == "sequence_bias" else name
            raise invalid(name, f"token ids are from 0 to {vocabulary - 1}, and {wrong} is none")
    if samples:
        return
    for name, plain in _OF_SAMPLING.items():
        if name in settings and settings[name] not in plain:
            raise invalid(name, "it is of sampling, and this request does not sample: give do_sample, or a temperature")


def with_own(asked: Asked, own: Any) -> Asked:
    """What a request asks of a model, each of whose answers is one text: its generation config may ask for beams or
    scores, and its stop strings count as those of the request do, in generated text only.

    Args:
        own: the model's generation config.
    """
    stop = getattr(own, "stop_strings", None) or []
    stop = dict.fromkeys([*asked.stop, *([stop] if isinstance(stop, str) else stop)])
    return replace(asked, stop=list(stop), settings={**asked.settings, **token_by_token(own), "stop_strings": []})


def _ids_in(value: Any) -> Iterator[int]:
    """Token ids in a setting: a number, or lists of them, with or without what each is worth."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, dict):
        for ids in value:
            yield from _ids_in(ids)
    elif isinstance(value, (list, tuple)):
        pair = len(value) == 2 and isinstance(value[0], (list, tuple)) and isinstance(value[1], (int, float))
        for each in value[:1] if pair else value:
            yield from _ids_in(each)


class Penalties:
    """A processor of scores: tokens that the answer has lose what OpenAI's `presence_penalty` and `frequency_penalty`
    say, once each and for each time.

    Args:
        prompt: tokens of the prompt, which count for nothing.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt = prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[1, vocabulary]` behind ids `[1, tokens]`."""
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1]).to(scores)
        return scores - self._frequency * counts - self._presence * (counts > 0)


def asked_of(config: Any) -> Asked:
    """A generation config as Transformers' handlers build it."""
    settings = config.to_diff_dict()
    for name in ("transformers_version", "use_cache", "max_new_tokens", "stop_strings", "max_length"):
        settings.pop(name, None)
    stop = config.stop_strings or []
    settings = {name: value for name, value in settings.items() if value is not None}
    if not config.do_sample:  # defaults of the model's own, which ask for nothing
        settings = {name: value for name, value in settings.items() if name not in _OF_SAMPLING}
    return Asked(
        max_tokens=config.max_new_tokens, settings=settings, stop=[stop] if isinstance(stop, str) else list(stop)
    )
