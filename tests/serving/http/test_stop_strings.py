"""A stop string that begins in the prompt: it ends an engine's sequence, as `generate`'s, and no server's answer."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from servers import NAME, Running, by_generate

from kvtier import Engine
from kvtier.serving.http.answers import Answer
from kvtier.serving.request import RequestOutput
from kvtier.serving.text import StopsInAnswer

PROMPT = "def first(items):\n    return"


@pytest.fixture(scope="module")
def across(trained: tuple[Any, Any]) -> str:
    """The prompt's last characters, and the first ones of its answer."""
    return PROMPT[-3:] + by_generate(trained, PROMPT, 1)


def test_an_engine_stops_where_generate_does(trained: tuple[Any, Any], across: str) -> None:
    model, tokenizer = trained
    ids = tokenizer(PROMPT)["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "stop_strings": across}
    expected = model.generate(torch.tensor([ids]), tokenizer=tokenizer, **asked)[0, len(ids) :].tolist()
    assert len(expected) == 1
    with Engine(model, tokenizer, host_budget="16MiB") as engine:
        (output,) = engine.generate_batch([ids], **asked).values()
    assert (output.generated_tokens, output.finish_reason) == (expected, "stop")


@pytest.mark.parametrize("n", [1, 2])
def test_only_generated_text_stops_the_answer_to_a_client(
    running: Running, trained: tuple[Any, Any], across: str, n: int
) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "n": n}
    done = running.client().completions.create(**asked, stop=across)
    whole = by_generate(trained, PROMPT, 8)
    assert [(x.text, x.finish_reason) for x in done.choices] == [(whole, "length")] * n
    stopped = running.client().completions.create(**asked, stop=whole[3:5])
    assert [(x.text, x.finish_reason) for x in stopped.choices] == [(whole[: whole.index(whole[3:5])], "stop")] * n
    parts = list(running.client().completions.create(**asked, stop=across, stream=True))
    assert "".join(part.choices[0].text for part in parts if not part.choices[0].index) == whole


def test_each_of_several_samples_ends_at_a_string_of_its_own_text(running: Running) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": 5, "n": 6}
    whole = [x.text for x in running.client().completions.create(**asked).choices]
    stop = ["\n", "e"]
    done = running.client().completions.create(**asked, stop=stop)
    cut = [min((text.index(s) for s in stop if s in text), default=len(text)) for text in whole]
    assert len(set(cut)) > 2
    assert [x.text for x in done.choices] == [text[:at] for text, at in zip(whole, cut, strict=True)]
    assert done.usage is not None
    assert done.usage.completion_tokens < 24 * 6


@pytest.mark.parametrize("stream", [False, True])
def test_no_string_ends_an_answer_before_it_has_its_least_tokens(
    running: Running, trained: tuple[Any, Any], stream: bool
) -> None:
    whole, first = by_generate(trained, PROMPT, 16), by_generate(trained, PROMPT, 4)
    stop = [first[1:], whole[len(first) - 2 : len(first) + 2]]
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stop": stop}

    def answer(least: int) -> tuple[str, str | None]:
        body = {"min_tokens": least}
        if not stream:
            (choice,) = running.client().completions.create(**asked, extra_body=body).choices
            return choice.text, choice.finish_reason
        parts = [x.choices[0] for x in running.client().completions.create(**asked, extra_body=body, stream=True)]
        return "".join(x.text for x in parts), parts[-1].finish_reason

    assert answer(0) == (whole[:1], "stop")
    assert answer(4) == (whole[: whole.index(stop[1], 2)], "stop"), "it goes on beyond them"
    assert answer(16) == (whole, "length")


def test_stop_strings_of_clients_take_no_table_of_the_vocabulary(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its width is the sum of all places that a token may have in them: gigabytes, for strings of one letter."""

    def table(*args: Any) -> Any:
        raise RuntimeError("a table of the vocabulary")

    monkeypatch.setattr("transformers.generation.utils.StopStringCriteria", table)
    stop = ["a" * (1024 - i) for i in range(15)] + ["漢"]
    done = running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, stop=stop)
    assert done.choices[0].finish_reason == "length"


@pytest.mark.parametrize("text", ["a naïve café", "東京 🙂🙃 x", "x" * 60 + "é"])
def test_a_sequence_ends_with_the_token_that_completes_a_stop_string(trained: tuple[Any, Any], text: str) -> None:
    tokenizer = trained[1]
    prompt, answer = tokenizer(text[:-1])["input_ids"], tokenizer(f"{text}.")["input_ids"]
    ends = StopsInAnswer(tokenizer, ["no such", text], len(prompt))
    special = tokenizer.all_special_ids[:1]
    ids, found = list(prompt), list[bool]()
    for token in answer[:2] + special + answer[2:]:
        ids.append(token)
        found.append(ends(torch.tensor([ids]), None))
    complete = next(i for i in range(len(answer)) if text in tokenizer.decode(answer[: i + 1])) + len(special)
    assert found.index(True) == complete


@pytest.mark.parametrize("stop", ["\n", "\U0001f642", "a\U0001f642\n"])
def test_a_string_counts_that_ends_behind_the_least_tokens_where_these_end_in_a_character(
    trained: tuple[Any, Any], stop: str
) -> None:
    tokenizer = trained[1]
    answer = tokenizer("a\U0001f642\n")["input_ids"]
    complete = next(i for i in range(len(answer)) if stop in tokenizer.decode(answer[: i + 1]))
    halves = [i for i in range(1, complete + 1) if tokenizer.decode(answer[:i]).endswith("\ufffd")]
    assert halves, "tokens are parts of characters"
    for least in halves:
        ends = StopsInAnswer(tokenizer, [stop], 0, least=least)
        found = [ends(torch.tensor([answer[: i + 1]]), None) for i in range(len(answer))]
        assert found.index(True) == complete, least


class Bytes:
    """A tokenizer whose tokens are some bytes."""

    all_special_ids = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    def decode(self, ids: Any, **options: Any) -> str:
        return b"".join(self._tokens[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("seed", range(300))
def test_an_answer_ends_before_the_first_of_stop_strings_that_overlap(seed: int) -> None:
    """Streamed or not, the text of all tokens up to one that completes a string, cut where the first one begins."""
    rng = random.Random(seed)
    letters = ["a", "b", "\u00e9", "\U0001f642"][: rng.randrange(2, 5)]
    data = "".join(rng.choice(letters) for _ in range(30)).encode()
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(15))})  # also in a character
    tokenizer = Bytes([data[a:b] for a, b in itertools.pairwise(cuts)])
    stop = ["".join(rng.choice(letters) for _ in range(rng.randrange(2, 6)))]
    for _ in range(rng.randrange(3)):
        one = rng.choice(stop)
        stop.append(rng.choice([one[1:], one[:-1], one + one, one + rng.choice(letters), one[1:] + one[0]]) or "b")
    texts = [data[:cut].decode(errors="replace").rstrip("\ufffd") for cut in cuts[1:]]
    ids = list(range(len(texts)))
    complete = next((i for i, text in enumerate(texts) if any(each in text for each in stop)), None)
    text = texts[-1 if complete is None else complete]
    whole = text[: min((text.index(each) for each in stop if each in text), default=None)]
    ends = StopsInAnswer(tokenizer, stop, 1)
    assert next((i for i in ids if ends(torch.tensor([[0, *ids[: i + 1]]]), None)), None) == complete
    for often in (0.0, 0.4, 1.0):
        answer, output, said = Answer(tokenizer, stop), RequestOutput("a", [0]), ""
        for i in ids[: None if complete is None else complete + 1]:
            output.generated_tokens.append(i)
            said += "".join(part.text for part in answer.feed(output)) if rng.random() < often else ""
            assert whole.startswith(said), "what is sent is not taken back"
        if not answer.reason:
            output.finish_reason = "length" if complete is None else "stop"
            said += "".join(part.text for part in answer.feed(output))
        assert (said, answer.reason) == (whole, "length" if complete is None else "stop")


class Stripping:
    """A tokenizer that leaves out the space a text begins with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Any, **options: Any) -> str:
        return str(self._tokenizer.decode(ids, **options)).removeprefix(" ")


@pytest.mark.parametrize("n", [1, 2])
def test_a_completion_goes_on_from_its_prompt_and_an_answer_to_a_chat_begins_a_text(
    running: Running, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(running.server.manager, "tokenizer", Stripping(trained[1]))
    (word,) = trained[1](" return")["input_ids"]
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 3, "n": n, "temperature": 1, "logit_bias": {str(word): 100}}
    completions, chat = running.client().completions, running.client().chat.completions
    done = completions.create(**asked, prompt=["x =", "y"])
    assert [x.text for x in done.choices] == [" return" * 3] * 2 * n
    parts = completions.create(**asked, prompt="x =", stream=True)
    assert "".join(x.choices[0].text for x in parts) == " return" * 3 * n
    stopped = completions.create(**asked, prompt="x =", stop=" return")
    assert [x.text for x in stopped.choices] == [""] * n
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == n, "the engine, too, ends it there"
    said = chat.create(**asked, messages=[{"role": "user", "content": "x ="}])
    assert [x.message.content for x in said.choices] == ["return return return"] * n
