"""Copies of what users hand in for each token: a processor or a criterion may keep what it has seen of its sequence.

`generate` calls one with all rows at once, and an engine once for each sequence: so each sequence has its own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from kvtier.errors import UnsupportedError

#: Options of `generate` that are such objects: two lists, and a function.
_LISTS, _FUNCTION = ("logits_processor", "stopping_criteria"), "prefix_allowed_tokens_fn"


def copied(objects: Sequence[Any], shared: Iterable[Any] = ()) -> list[Any]:
    """Copies of processors and criteria, for another sequence. What they have in common the copies have in common, too.
    Models and tokenizers that are their attributes are not copied, and no function is.

    Args:
        objects: as they are before their first call.
        shared: what is not copied.

    Raises:
        UnsupportedError: one of them cannot be copied.
    """
    attributes = itertools.chain.from_iterable(getattr(each, "__dict__", {}).values() for each in objects)
    memo = {
        id(x): x for x in (*shared, *(x for x in attributes if isinstance(x, (nn.Module, PreTrainedTokenizerBase))))
    }
    found = []
    for each in objects:
        try:
            found.append(copy.deepcopy(each, memo))
        except Exception as error:
            raise UnsupportedError(
                f"{type(each).__name__} cannot be copied ({type(error).__name__}: {error}), and every sequence needs "
                "one of its own, for it may keep what it has seen of one. Add a request for each sequence, with an "
                "object of its own, or give its class a `__deepcopy__`."
            ) from error
    return found


def options_of_each(options: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Options of `generate` for so many prompts, one after the other. The first has the objects that are given, and
    each other one copies of them as they are now.

    Raises:
        UnsupportedError: one of them cannot be copied. Before the first one is given.
    """
    given = {name: list(options[name]) for name in _LISTS if options.get(name)}
    if options.get(_FUNCTION) is not None:
        given[_FUNCTION] = [options[_FUNCTION]]
    before = _copied_options(given) if count > 1 else given
    yield {**options, **_as_options(given)}
    for _ in range(count - 1):
        yield {**options, **_as_options(_copied_options(before))}


def _copied_options(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    found = iter(copied([x for each in given.values() for x in each]))
    return {name: list(itertools.islice(found, len(each))) for name, each in given.items()}


def _as_options(given: Mapping[str, list[Any]]) -> dict[str, Any]:
    return {name: each[0] if name == _FUNCTION else each for name, each in given.items()}
