"""Text as it comes is the text of all tokens, and ends before a stop string."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvtier.serving.text import StopCutter, StopsInAnswer, TextStream, text_of

TEXTS = (
    "def f(x):\n    return x\n",
    "naïve café, 東京, 🙂🙃 and 👩‍👩‍👧",
    "\ufffd is a character, too",
    "",
    "  spaces  ",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of the trained model: its tokens are bytes and what they are merged to."""
    return AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "examples" / "pylm")


@pytest.mark.parametrize("text", TEXTS)
def test_the_parts_together_are_the_text_of_all_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    parts = [stream.put(token) for token in ids]
    assert not any(part.endswith("\ufffd") for part in parts) or "\ufffd" in text
    assert "".join([*parts, stream.end()]) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_have_the_text_of_all_of_them(tokenizer: Any, seed: int) -> None:
    """Broken characters among them."""
    rng = random.Random(seed)
    ids = [rng.randrange(2, len(tokenizer)) for _ in range(200)]
    ids[50:58] = tokenizer("🙂 é")["input_ids"][:3]
    stream = TextStream(tokenizer)
    said = "".join([*(stream.put(token) for token in ids), stream.end()])
    assert said == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer that leaves out the space a text begins with, as those of Llama 2 and Mistral."""
    names = ("<s>", "▁the", "▁end", "end", "▁", "<0xC3>", "<0xA9>")
    made = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(names)}, []))
    parts = [decoders.Replace(names[4], " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


@pytest.mark.parametrize(
    ("behind", "ids", "text"),
    [
        ([], [1, 2], "the end"),
        ([2], [1, 2], " the end"),
        ([2], [3], "end"),
        ([2], [4, 4, 1], "   the"),
        ([4], [3, 2], "end end"),
        ([0], [1], "the"),  # a text begins there, too
        ([2, 0], [1], " the"),
        ([2], [5, 6, 2], "\u00e9 end"),
        ([1, 5, 6], [2, 2], " end end"),
        ([2, 5], [6, 2], "\ufffd end"),  # of a character that began before
    ],
)
def test_a_text_goes_on_from_what_is_before_it(words: Any, behind: list[int], ids: list[int], text: str) -> None:
    stream = TextStream(words, behind=behind)
    assert "".join([*(stream.put(token) for token in ids), stream.end()]) == text
    ends = StopsInAnswer(words, [text], len(behind), behind=behind)
    found = [ends(torch.tensor([behind + ids[: n + 1]]), None) for n in range(len(ids))]
    assert found == [False] * (len(ids) - 1) + [True]
    if behind:
        assert copy.deepcopy(ends)(torch.tensor([behind + ids]), None)


def test_a_token_has_the_space_that_it_has_behind_others(words: Any, tokenizer: Any) -> None:
    assert [text_of(words, i) for i in range(7)] == ["<s>", " the", " end", "end", " ", "\ufffd", "\ufffd"]
    for token in range(len(tokenizer)):
        assert text_of(tokenizer, token) == tokenizer.decode([token]), "its tokens have their own spaces"


@pytest.mark.parametrize("seed", range(200))
def test_text_in_any_parts_ends_before_the_first_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(40)))
    strings = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(5))]
    cutter, said, at, step = StopCutter(strings), "", 0, 0
    while at < len(text) and cutter.found is None:
        step = rng.randrange(1, 6)
        said += cutter.put(text[at : at + step])
        at += step
        assert text.startswith(said), "nothing is said that is taken back"
    if cutter.found is None:
        said += cutter.end()
    ends = min((text[:at].index(s) for s in strings if s in text[:at]), default=-1)
    assert said == (text if ends < 0 else text[:ends])
    assert (cutter.found is not None) == (ends >= 0)
    assert not any(s in text[: at - step] for s in strings), "a string that is complete ends it"


@pytest.mark.parametrize("seed", range(200))
def test_a_string_that_ends_where_none_counts_does_not_end_the_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(40)))
    strings = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 3))]
    least = rng.randrange(10)
    found = [stop for stop in range(least + 1, len(text) + 1) if text[:stop].endswith(tuple(strings))]
    ends = min((text[: found[0]].rfind(s) for s in strings if text[: found[0]].endswith(s)), default=0) if found else -1
    cutter = StopCutter(strings)
    said = "".join(cutter.put(x, ends=at >= least) for at, x in enumerate(text))
    said += "" if found else cutter.end()
    assert said == (text[:ends] if found else text)
    assert (cutter.found is not None) == bool(found)


class Bytes:
    """A tokenizer whose tokens are given bytes. It counts the tokens that it decodes."""

    def __init__(self, *tokens: bytes) -> None:
        self._tokens = tokens
        self.decoded = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return b"".join(self._tokens[token] for token in tokens).decode(errors="replace")


def test_what_is_whole_is_said_before_half_of_a_character() -> None:
    stream = TextStream(Bytes(b"a\xe6", b"\x97", b"\xa5b", b"\xff"))
    assert [stream.put(token) for token in (0, 1, 2, 3, 0, 1, 2)] == ["a", "", "日b", "", "\ufffda", "", "日b"]
    assert (stream.put(0), stream.end(), stream.end()) == ("a", "\ufffd", "")


@pytest.mark.parametrize("nothing", [b"", b"\x97"])
def test_tokens_without_text_are_not_decoded_again_with_each_that_follows(nothing: bytes) -> None:
    tokenizer = Bytes(b"a", nothing)
    stream = TextStream(tokenizer)
    said = "".join(stream.put(token) for token in [0, *[1] * 2000, 0])
    assert said + stream.end() == b"".join((b"a", nothing * 2000, b"a")).decode(errors="replace")
    assert tokenizer.decoded < 2000 * 64


@pytest.mark.parametrize("stop", ["x", "🙂" * 1024, "a" * 1023 + "b"])
def test_what_a_token_costs_does_not_grow_with_a_stop_string(stop: str) -> None:
    tokenizer = Bytes(b"a")
    ends, ids = StopsInAnswer(tokenizer, [stop], 1), torch.zeros(1, 1500, dtype=torch.long)
    assert not any(ends(ids[:, :count], None) for count in range(1, 1501))
    assert tokenizer.decoded < 1500 * 64


def test_half_of_a_character_is_not_the_one_that_stands_for_it(tokenizer: Any) -> None:
    for text, whole in (("日本 🙂", False), ("日本 \ufffd.", True)):
        ids = tokenizer(text)["input_ids"]
        ends = StopsInAnswer(tokenizer, ["\ufffd"], 0)
        assert any(ends(torch.tensor([ids[:count]]), None) for count in range(1, len(ids) + 1)) is whole


def test_each_sequence_has_a_text_of_its_own() -> None:
    ends = StopsInAnswer(Bytes(b"a", b"b"), ["ab"], 1)
    assert not ends(torch.tensor([[1, 1, 0]]), None)
    other = copy.deepcopy(ends)
    assert not other(torch.tensor([[1, 1]]), None)
    assert ends(torch.tensor([[1, 1, 0, 1]]), None)
    assert not other(torch.tensor([[1, 1, 1]]), None)
    assert not ends(torch.tensor([[1, 1]]), None), "fewer tokens are another text"
    assert ends(torch.tensor([[1, 0, 0, 1]]), None)
