"""What is computed to find out what a model does: scores and keys and values of one sequence, each way."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from kvtier.hf.models.generation import (
    cache_argument,
    device_of,
    goes_on_from_other_calls,
    inner,
    positions,
    takes_logits_to_keep,
)
from kvtier.hf.models.names import CACHE

#: Tokens of the trial whether states go on, and of its first part.
_TRIAL, _FIRST = 12, 7


def recomputed(model: Any, ids: torch.Tensor, layers: Collection[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of some layers, `[1, heads, tokens, dim]`, computed from ids `[1, tokens]` in one forward."""
    cache = DynamicCache(config=model.config)
    for i in layers:
        if hasattr(cache.layers[i], "sliding_window"):
            cache.layers[i].sliding_window = ids.shape[1] + 2  # it keeps all tokens, and masks know the window
    options: dict[str, Any] = {"logits_to_keep": 1} if takes_logits_to_keep(inner(model)) else {}
    options |= positions(model, torch.ones_like(ids))
    with torch.no_grad():
        inner(model)(input_ids=ids, use_cache=True, **{CACHE: cache}, **options)
    return {i: (cache.layers[i].keys, cache.layers[i].values) for i in layers}


def scores_in_parts(
    model: Any, ids: Sequence[int], parts: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores `[vocabulary]` behind each part of a sequence: computed part by part on a `DynamicCache`, and those of one
    forward without a cache."""
    row = torch.tensor([list(ids)], device=device_of(model))
    found, start, name = list[torch.Tensor](), 0, cache_argument(model)
    told = goes_on_from_other_calls(model)

    def at(start: int, stop: int) -> dict[str, torch.Tensor]:
        return {"position_ids": torch.arange(start, stop, device=row.device)[None]} if told else {}

    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for count in parts:
            stop = start + count
            given: dict[str, Any] = {name: cache, **at(start, stop)}
            found.append(model(input_ids=row[:, start:stop], use_cache=True, **given).logits[0, -1])
            start = stop
        whole = model(input_ids=row[:, :start], use_cache=False, **at(0, start)).logits[0]
    return found, [whole[stop - 1] for stop in itertools.accumulate(parts)]


class StatesTrial(NamedTuple):
    """How a model continues from states.

    Attributes:
        go_on: several tokens may follow a state at once: some models begin again then, without saying so.
        in_cache: the states are in the cache alone: some models keep one in themselves, that of their last forward.
    """

    go_on: bool
    in_cache: bool


def tried_states(model: Any) -> StatesTrial:
    """Whether several tokens may follow a state at once, and other sequences come between: tried."""
    device, name = device_of(model), cache_argument(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_TRIAL, device=device) * 7 % max(vocabulary - 1, 1) + 1)[None].clamp(max=vocabulary - 1)

    def score(start: int, stop: int, cache: DynamicCache | None) -> torch.Tensor:
        given: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, name: cache}
        given |= positions(model, torch.ones_like(ids[:, :stop]), start)
        found: torch.Tensor = model(input_ids=ids[:, start:stop], **given).logits[0, -1].float()
        return found

    def begun() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        score(0, _FIRST, cache)
        return cache

    with torch.no_grad():
        whole = score(0, _TRIAL, None)
        parts = score(_FIRST, _TRIAL, begun())
        cache = begun()
        singles = [score(i, i + 1, cache) for i in range(_FIRST, _TRIAL)]
        cache = begun()
        score(0, 2, DynamicCache(config=model.config))
        behind_another = score(_FIRST, _FIRST + 1, cache)
    # One token at a time is how models decode, and right: what it differs from the whole by is rounding. Where that is
    # in doubt the answer is no, which costs time and no token.
    eps = 2 * torch.finfo(next(model.parameters()).dtype).eps * whole.abs().max()
    rounding = (whole - singles[-1]).abs().max() + eps
    go_on = (parts - singles[-1]).abs().max() <= 2 * rounding
    in_cache = (behind_another - singles[0]).abs().max() <= 2 * eps
    return StatesTrial(bool(go_on.item()), bool(in_cache.item()))


def next_scores(model: Any, ids: Sequence[int], cache: Any, *, told: bool = False) -> tuple[torch.Tensor, Any]:
    """The scores `[vocabulary]` of the token behind `ids`, as `generate` computes them, and the cache that goes on.

    Args:
        cache: of the first tokens; it must lack at least one. None: every token is computed, and no cache is made.
        told: the positions of the tokens are given to the model (`goes_on_from_other_calls`).
    """
    # Said, as the model's own config may say otherwise (MPT's does).
    given: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, cache_argument(model): cache}
    if told:
        given["position_ids"] = torch.arange(len(ids), device=device_of(model))[None]
    out = _greedily(model, ids, 1, **given)
    return out.logits[0][0], None if cache is None else getattr(out, CACHE)


def generated_scores(model: Any, ids: Sequence[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """So many greedy tokens of `generate`, and the scores `[vocabulary]` that each was chosen by."""
    out = _greedily(model, ids, count)
    return out.sequences[0, len(ids) :].tolist(), [scores[0] for scores in out.logits]


def _greedily(model: Any, ids: Sequence[int], count: int, **given: Any) -> Any:
    row = torch.tensor([list(ids)], device=device_of(model))
    return model.generate(
        row,
        attention_mask=torch.ones_like(row),
        generation_config=GenerationConfig(
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        ),
        **given,
    )
