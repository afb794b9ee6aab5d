"""Tokens to text as they come, and stop strings in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: Tokens after which a character is given up that has not come whole.
_LONGEST_CHARACTER = 16
#: The characters that byte-level vocabularies write bytes with (GPT-2): those that can be seen stand for themselves.
_SEEN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(x): x for x in _SEEN} | {chr(256 + i): x for i, x in enumerate(sorted(set(range(256)) - set(_SEEN)))}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream:
    """The text of tokens that come one by one. The parts together are the text of all of them.

    Args:
        tokenizer: of Transformers.
        skip_special_tokens: whether they are left out.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._silent = _silent(tokenizer) if skip_special_tokens else frozenset()
        self._tokens: list[int] = []  # the last of those that were said, and those that were not
        self._said = 0

    def put(self, token: int) -> str:
        """What text a token adds; "" while a character has not come whole."""
        if token in self._silent:
            return ""
        self._tokens.append(token)
        return self._new(last=False)

    def end(self) -> str:
        """What was held back."""
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        """Decoding begins one step back, for tokens may begin with a space only behind others."""
        said, text = self._decoded(self._tokens[: self._said]), self._decoded(self._tokens)
        waits = len(self._tokens) - self._said < _LONGEST_CHARACTER
        if len(text) <= len(said) or (text.endswith(_BROKEN) and waits and not last):
            return ""
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return text[len(said) :]

    def _decoded(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class StopCutter:
    """Text up to where the first of some strings begins.

    Args:
        strings: none of them empty.

    Attributes:
        found: the string that the text ended at; None: none yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def put(self, text: str, *, ends: bool = True) -> str:
        """What of the text can be said: not what may be the beginning of a string.

        Args:
            ends: whether a string counts that ends in this text.
        """
        if self.found is not None:
            return ""
        known = len(self._held)  # no string counts that ends there
        self._held += text
        found = [(self._held.find(s, max(0, known - len(s) + 1)), -len(s), s) for s in self._strings if ends]
        at = [each for each in found if each[0] >= 0]
        if at:
            start, _, self.found = min(at)
            said, self._held = self._held[:start], ""
            return said
        keep = max((_overlap(self._held, s) for s in self._strings), default=0)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def end(self) -> str:
        """What was held back, and is no stop string."""
        said, self._held = self._held, ""
        return said


class StopsInAnswer:
    """A stopping criterion: whether one of some strings is in the text of an answer. What the prompt ends with is no
    part of that, unlike for `stop_strings` of `generate`.

    It decodes the last tokens, and so needs no table of a vocabulary, whose size grows with the strings. A string that
    many tokens without any text interrupt is left to the `StopCutter` that reads the whole answer.

    Args:
        tokenizer: of Transformers.
        strings: none of them empty.
        prompt: tokens of the prompt.
        least: tokens of the answer; a string does not count that ends in them.
        skip_special_tokens: whether they are left out of the text.
    """

    def __init__(
        self, tokenizer: Any, strings: Sequence[str], prompt: int, *, least: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._prompt = prompt
        self._least = least
        self._skip = skip_special_tokens
        self._silent = _silent(tokenizer) if skip_special_tokens else frozenset()
        # A token has at least a byte; a few more are behind the string, or begin with half of a character.
        self._last = max(len(x.encode()) for x in self._strings) + _LONGEST_CHARACTER

    def __deepcopy__(self, memo: Any) -> StopsInAnswer:
        """Itself: it keeps nothing of a sequence."""
        return self

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        """Whether a sequence `[1, tokens]` ends."""
        count = input_ids.shape[1]
        start, free = max(self._prompt, count - self._last), self._prompt + self._least
        if count <= free:
            return False
        # Without what is half of a character there, for the whole text has one in its place.
        known = len(self._decoded(input_ids[0, start:free]).rstrip(_BROKEN)) if start < free else 0
        text = self._decoded(input_ids[0, start:])
        return any(text.find(string, max(0, known - len(string) + 1)) >= 0 for string in self._strings)

    def _decoded(self, ids: Any) -> str:
        tokens = [token for token in ids.tolist() if token not in self._silent]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes | None:
    """The bytes of a token, which may be a part of a character; None: they are not known.

    Args:
        tokenizer: of Transformers.
        text: that it decodes the token to.
    """
    if _BROKEN not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if fallback := _FALLBACK.fullmatch(name):
        found = bytes([int(fallback[1], 16)])
    elif _BYTES.keys() >= set(name):
        found = bytes(_BYTES[x] for x in name)
    else:
        return None
    return found if found.decode(errors="replace") == text else None


def _silent(tokenizer: Any) -> frozenset[int]:
    """Tokens that have no text where special tokens are left out."""
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def _overlap(text: str, string: str) -> int:
    """Characters at the end of a text that a string begins with."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
