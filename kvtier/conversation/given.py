"""What callers give: names, salts, token ids and counts, and what is said of those that cannot be."""

from __future__ import annotations

import reprlib

import torch

from kvtier.conversation.index import packed
from kvtier.errors import ConfigError

#: Characters of a conversation's name. It is a part of every row that is saved of it.
LONGEST_NAME = 2**16


def check_name(name: object) -> None:
    """Whether a conversation can have a name.

    Raises:
        ConfigError: it cannot.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={reprlib.repr(name)}: a conversation has a name, a string that is not empty.")
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"name={reprlib.repr(name)} has {len(name)} characters: a conversation's name has {LONGEST_NAME} at most."
        )


def check_salt(salt: object) -> None:
    """Whether calls can be found by a salt.

    Raises:
        ConfigError: they cannot.
    """
    try:
        hash(salt)
    except TypeError:
        raise ConfigError(
            f"salt={reprlib.repr(salt)} cannot be compared: give a string, a number or a tuple of these."
        ) from None


def check_count(name: str, count: object) -> None:
    """Whether an argument of this name is how many there are of something.

    Raises:
        ConfigError: it is none.
    """
    if type(count) is not int:
        raise ConfigError(f"{name}={reprlib.repr(count)}: give how many, a whole number.")


def token_ids(ids: object) -> bytes:
    """Token ids `[tokens]`, a sequence or a tensor, packed; none are a sequence without tokens.

    Raises:
        ConfigError: they are no token ids.
    """
    given = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    try:
        if isinstance(given, (str, bytes, bytearray, memoryview)):  # of which Python would take each character
            raise TypeError
        return packed(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"ids={reprlib.repr(given)} are no token ids: give those of one sequence, a list of whole numbers."
        ) from None
