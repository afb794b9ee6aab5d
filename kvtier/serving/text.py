"""Tokens to text as they come, and stop strings in it."""

from __future__ import annotations

import copy
import functools
import itertools
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
        silent: others that are left out.
        behind: tokens that the text goes on from, and which are no part of it. Without them it is that of the tokens
            alone: many tokenizers leave out the space that a text begins with.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        silent: frozenset[int] = frozenset(),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._silent = silent | (_silent(tokenizer) if skip_special_tokens else frozenset())
        self._tokens = self._last(behind)  # the last of those that were said, and those that were not
        self._said = len(self._tokens)
        self._early = 0  # characters of the others that were said, for only the last one has not come whole

    def _last(self, behind: Sequence[int]) -> list[int]:
        """The last of some tokens, one or those of a character; none, where a character has not come whole there."""
        spoken = (token for token in reversed(behind) if token not in self._silent)
        found = list[int]()
        for token in itertools.islice(spoken, _LONGEST_CHARACTER):
            found.insert(0, token)
            if not self._decoded(found).endswith(_BROKEN):
                return found
        return []

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
        waits = len(self._tokens) - self._said < _LONGEST_CHARACTER and not last
        whole = text.rstrip(_BROKEN) if waits else text
        new = whole[len(said) + self._early :]
        if len(whole) < len(text):
            self._early += len(new)
        elif len(text) > len(said):
            del self._tokens[: self._said]
            self._said, self._early = len(self._tokens), 0
        elif not waits:
            del self._tokens[self._said :]  # they have no text, and are not decoded again with each that follows
        return new

    def _decoded(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class StopCutter:
    """Text up to where the first of some strings begins.

    What it does for a character does not grow with the strings' lengths.

    Args:
        strings: none of them empty.

    Attributes:
        found: the string that the text ended at; None: none yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._borders = [_borders(each) for each in self._strings]
        self._alike = [0] * len(self._strings)  # characters of each that the text ends with, and the string begins with
        self._held = ""
        self.found: str | None = None

    def put(self, text: str, *, ends: bool = True) -> str:
        """What of the text can be said: not what may be the beginning of a string.

        Args:
            ends: whether a string counts that ends in this text.
        """
        if self.found is not None:
            return ""
        found = [(place, -len(self._strings[i]), i) for i in range(len(self._strings)) for place in self._read(i, text)]
        self._held += text
        if found and ends:
            start, _, number = min(found)
            said, self._held = self._held[:start], ""
            self.found = self._strings[number]
            return said
        keep = len(self._held) - max(self._alike, default=0)
        said, self._held = self._held[:keep], self._held[keep:]
        return said

    def _read(self, number: int, text: str) -> list[int]:
        """Go on with a string; where in what is held it begins, as often as it ends in the text."""
        string, borders, alike = self._strings[number], self._borders[number], self._alike[number]
        found = list[int]()
        for place, character in enumerate(text, len(self._held) + 1):
            while alike and string[alike] != character:
                alike = borders[alike]
            alike += string[alike] == character
            if alike == len(string):
                found.append(place - alike)
                alike = borders[alike]
        self._alike[number] = alike
        return found

    def end(self) -> str:
        """What was held back, and is no stop string."""
        said, self._held = self._held, ""
        return said


class StopsInAnswer:
    """A stopping criterion: whether one of some strings is in the text of an answer, as its client reads it. What the
    prompt ends with is no part of that, unlike for `stop_strings` of `generate`.

    It reads each token once, and so needs no table of a vocabulary, whose size grows with the strings.

    Args:
        tokenizer: of Transformers.
        strings: none of them empty.
        prompt: tokens of the prompt.
        least: tokens of the answer; a string does not count that ends in them.
        skip_special_tokens, silent, behind: what is left out of the text, and what it goes on from: see `TextStream`.

    Attributes:
        on_host: an engine gives it ids on the host, wherever the model is.
    """

    on_host = True

    def __init__(
        self,
        tokenizer: Any,
        strings: Sequence[str],
        prompt: int,
        *,
        least: int = 0,
        skip_special_tokens: bool = True,
        silent: frozenset[int] = frozenset(),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._prompt = prompt
        self._least = least
        self._options: dict[str, Any] = {
            "skip_special_tokens": skip_special_tokens,
            "silent": silent,
            "behind": behind,
        }
        self._begin()

    def _begin(self) -> None:
        self._text = TextStream(self._tokenizer, **self._options)
        self._cutter = StopCutter(self._strings)
        self._read = self._prompt

    def __deepcopy__(self, memo: Any) -> StopsInAnswer:
        """One for another sequence behind the prompt, with the same tokenizer."""
        made = copy.copy(self)
        made._begin()
        return made

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        """Whether a sequence `[1, tokens]` ends: the one of the last call, with more tokens, or from fewer on."""
        if input_ids.shape[1] < self._read:
            self._begin()
        for token in input_ids[0, self._read :].tolist():
            self._read += 1
            self._cutter.put(self._text.put(token), ends=self._read > self._prompt + self._least)
        return self._cutter.found is not None


def text_of(tokenizer: Any, token: int) -> str:
    """The text that a token has behind others: with the space that many tokenizers leave out where a text begins.

    Args:
        tokenizer: of Transformers.
    """
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    text: str = alone if _BROKEN in alone or not twice.startswith(alone) else twice[len(alone) :]
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


@functools.lru_cache(maxsize=64)  # answers to one prompt have the same strings
def _borders(string: str) -> tuple[int, ...]:
    """For each number of its first characters, how many of them, but not all, are both their beginning and their end
    (Knuth, Morris and Pratt)."""
    found, alike = [0, 0], 0
    for character in string[1:]:
        while alike and string[alike] != character:
            alike = found[alike]
        alike += string[alike] == character
        found.append(alike)
    return tuple(found)
