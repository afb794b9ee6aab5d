"""Keys, as a folder has them: what has computed keys and values, what these depend on besides tokens, and the salt of
their calls, as text."""

from __future__ import annotations

import re

#: What folders of before do not say.
UNKNOWN = "unknown"
_COMPUTED_BY = re.compile(r"\(\('(transformers [^']*)', ")


def key_of(computed_by: str, computed_as: tuple[object, ...], salt: object) -> str:
    """A key.

    Args:
        computed_by: a model's code: the name and the version of its package.
        computed_as: what keys and values depend on besides tokens; see `hf.models.generation.depends`.
        salt: of its calls.
    """
    return repr(((computed_by, *computed_as), salt))


def prefix_of(computed_by: str) -> str:
    """What all keys begin with of what that code computes."""
    return f"(({computed_by!r}, "


def has_salt(key: str, salt: object) -> bool:
    """Whether a key is of calls with this salt."""
    return key.endswith(f", {salt!r})")  # it is the repr of a tuple, and the salt is its end


def computed_by(key: str) -> str:
    """The code that has computed what is under a key."""
    found = _COMPUTED_BY.match(key)
    return found[1] if found else UNKNOWN
