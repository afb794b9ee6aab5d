"""Keys, as a folder has them: what has computed keys and values, what these depend on besides tokens, and the salt of
their calls, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What folders of before do not say.
UNKNOWN = "unknown"
_COMPUTED_BY = re.compile(r"\(\('(transformers [^']*)', ")


def key_of(computed_by: str, computed_as: tuple[object, ...], salt: object) -> str:
    """A key.

    Args:
        computed_by: a model's code: the name and the version of its package.
        computed_as: what keys and values depend on besides tokens; see `hf.models.identity.dependence.depends`.
        salt: of its calls.
    """
    return repr(((computed_by, *computed_as), salt))


def prefix_of(computed_by: str) -> str:
    """What all keys begin with of what that code computes."""
    return f"(({computed_by!r}, "


def end_of(salt: object) -> str:
    """What all keys of calls with this salt end with: a key is the repr of a tuple, and the salt is its end."""
    return f", {salt!r})"


def with_ends(keys: Iterable[str], ends: Iterable[str]) -> dict[str, list[str]]:
    """For each of some ends that some key has: the keys that end with it. Takes time in the number of keys, and in that
    of the different lengths of ends, not in the number of ends."""
    asked, found = set(ends), dict[str, list[str]]()
    lengths = set(map(len, asked))
    for key in keys:
        for length in lengths:
            if (end := key[-length:]) in asked:
                found.setdefault(end, []).append(key)
    return found


def computed_by(key: str) -> str:
    """The code that has computed what is under a key."""
    found = _COMPUTED_BY.match(key)
    return found[1] if found else UNKNOWN
