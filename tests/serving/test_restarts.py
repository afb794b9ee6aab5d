"""What an engine keeps in a store with a directory, a later engine begins with, whatever layers the model has: with the
tokens of `generate`. Of models with windows, or with states next to keys and values, an engine keeps another form than
calls of `generate` do: all tokens, in blocks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from model_types import tiny_model_of_type
from transformers import CONFIG_MAPPING, PreTrainedModel
from workloads import same_as_generate, stream_of_tokens

from kvtier import ConversationStore, Engine
from kvtier.conversation.index import packed

NEW = 5
#: How a model is built, and how it is run. With windows: gemma3 and those behind it, lara_mini; states next to keys and
#: values: falcon_h1.
EAGER, OF_TYPE = ("gemma2", "gpt_oss"), ("cohere2", "lara_mini", "falcon_h1")
NAMES = {"llama": "packed", "gemma3": "packed", **dict.fromkeys(EAGER, "packed"), "cohere2": "packed"} | dict.fromkeys(
    ("qwen3_next", "lara_mini", "falcon_h1"), "ragged"
)


#: Of host memory.
BUDGETS = {"gemma3": "160KiB", "falcon_h1": "120KiB"}


def model_of(name: str) -> PreTrainedModel:
    return tiny_model_of_type(name) if name in OF_TYPE else tiny_model(name, "eager" if name in EAGER else "sdpa")


def tokens(number: int, count: int) -> list[int]:
    """That every one of the models knows."""
    return [x % 60 + 1 for x in stream_of_tokens(number)[:count]]


def store_of(name: str, directory: Path | None = None, **options: Any) -> ConversationStore:
    given = {"host_budget": "8MiB", "block_size": 4, "directory": directory, "loading": "always"}
    return ConversationStore(model_of(name), **(given | options))


@contextlib.contextmanager
def engine_of(store: ConversationStore) -> Iterator[Engine]:
    """By its clock, which hardly goes on, no request has waited for the disk for too long."""
    ticks = itertools.count()
    with contextlib.closing(Engine(store.model, store=store, clock=lambda: next(ticks) * 1e-9)) as engine:
        yield engine
    store.check_integrity()


def ask(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """The answer, which is that of `generate`; and how many tokens of the prompt were not computed."""
    request = engine.add_request(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options)
    while engine.step():
        engine.check_integrity()
    output = engine.output(request)
    assert output.error is None, output.error
    given = {"attention_mask": torch.ones(1, len(prompt), dtype=torch.long), "do_sample": False, "pad_token_id": 0}
    out = engine.model.generate(
        torch.tensor([prompt]),
        **given,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert same_as_generate(output.generated_tokens, out.sequences[0, len(prompt) :].tolist(), out.scores)
    return output.generated_tokens, output.cached_tokens


@pytest.mark.parametrize("name", [x for x in NAMES if x not in OF_TYPE or x in CONFIG_MAPPING])
def test_an_engine_goes_on_with_what_an_engine_before_it_has_saved(name: str, tmp_path: Path) -> None:
    history = tokens(1, 40)
    for turn in range(3):
        with store_of(name, tmp_path) as store, engine_of(store) as engine:
            assert engine.runner == NAMES[name]
            answer, cached = ask(engine, history)
            # The last token of the answer was never computed.
            assert cached == (len(history) - 4 if turn else 0)
            assert store.verify(9) == len(history) + NEW - 1
        history = [*history, *answer, 5 + turn, 6, 7]


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_what_has_left_the_memory_comes_back_from_the_disk(name: str, tmp_path: Path) -> None:
    """Of one engine, whose memory has no room for two conversations."""
    with store_of(name, tmp_path, host_budget=BUDGETS[name]) as store, engine_of(store) as engine:
        history = tokens(1, 80)
        answer, _ = ask(engine, history)
        history += [*answer, 8, 9]
        for number in (2, 3):
            ask(engine, tokens(number, 80))
        with store.memory.lock, store.memory.change:
            key = engine._prefixes.key(None)  # type: ignore[union-attr]
            assert sum(n for n, _ in store.kept.pieces(key, packed(history))) < 60, "it is in memory still"
        engine._costs.rate = 1e-6  # by which nothing is computed sooner than it is loaded
        assert ask(engine, history)[1] == len(history) - 3


def test_calls_and_an_engine_keep_a_windowed_conversation_each_in_its_way(tmp_path: Path) -> None:
    """Neither begins with what the other one has kept, and both are parked, woken and dropped."""
    history, greedy = tokens(1, 40), {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with store_of("gemma3", tmp_path) as store, engine_of(store) as engine:
        assert ask(engine, history)[1] == 0
        out = store.generate(torch.tensor([history]), **greedy)[0].tolist()
        assert store.reuse[0].cached == 0
        assert len(store.kept.entries) == 2
        assert ask(engine, [*out, 5])[1] == len(out) - 1
        store.generate(torch.tensor([[*out, 5]]), **greedy)
        assert store.reuse[0].cached == len(out) - 1
        store.park(out)
        store.drop(out, 0, len(out))
        assert all(sequence.start for sequence in store.kept.entries), "a beginning is kept"
    with store_of("gemma3", tmp_path) as store:
        wake = store.wake(out)
        assert wake.wait(120)
        assert (wake.loaded, wake.why) == (len(out) - 1 + len(out), "")
        store.check_integrity()


def test_the_rank_of_a_conversation_holds_for_what_an_engine_keeps_of_a_windowed_model() -> None:
    with store_of("gemma3", host_budget=BUDGETS["gemma3"]) as store, engine_of(store) as engine:
        history = tokens(1, 40)
        store.open("alice", pinned=True)
        answer, _ = ask(engine, history, conversation="alice")
        history += answer
        for number in (2, 3, 4):
            ask(engine, tokens(number, 40))
            store.check_integrity()
        assert ask(engine, [*history, 8])[1] == len(history) - 1, "what is pinned has gone"
