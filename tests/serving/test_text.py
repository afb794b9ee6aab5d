"""Text as it comes is the text of all tokens, and ends before a stop string."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvtier.serving.text import StopCutter, TextStream

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


@pytest.mark.parametrize("seed", range(200))
def test_text_in_any_parts_ends_before_the_first_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randrange(40)))
    strings = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(3))]
    cutter, said, at = StopCutter(strings), "", 0
    ends = min((text[:stop].find(s) for stop in range(len(text) + 1) for s in strings if s in text[:stop]), default=-1)
    while at < len(text) and cutter.found is None:
        step = rng.randrange(1, 6)
        said += cutter.put(text[at : at + step])
        at += step
        assert text.startswith(said), "nothing is said that is taken back"
        assert ends < 0 or len(said) <= ends
    if cutter.found is None:
        said += cutter.end()
    assert said == (text if ends < 0 else text[:ends])
    assert (cutter.found is not None) == (ends >= 0)
