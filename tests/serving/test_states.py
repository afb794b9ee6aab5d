"""Models with recurrent states begin with what earlier requests have left, at copies of their states: the tokens of
`generate`."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from families import build_model
from model_types import tiny_model_of_type
from settled import settled
from transformers import PreTrainedModel
from workloads import Load, same_as_generate
from workloads import stream_of_tokens as tokens_below_120

import kvtier
from kvtier import ConversationStore, Engine
from kvtier.serving import prefixes
from kvtier.serving.costs import Costs
from kvtier.serving.runners import ragged

NEW = 6
#: Attention and states in layers of their own, states alone, both in one layer; and one that goes on token by token.
GOES_ON, TOKEN_BY_TOKEN = ("qwen3_next", "lfm2", "falcon_h1"), ("jamba", "mamba")


def stream_of_tokens(number: int) -> list[int]:
    """That every one of the models knows."""
    return [x % 60 + 1 for x in tokens_below_120(number)]


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return build_model(name, "sdpa") if name in ("qwen3_next", "jamba") else tiny_model_of_type(name)


def generated(name: str, prompt: list[int], new: int = NEW) -> Any:
    return model_of(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )


def ask(engine: Engine, name: str, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """Tokens of a request, which are those of `generate`, and how many of its prompt were not computed."""
    request = engine.add_request(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options)
    while engine.step():
        engine.check_integrity()
    output = engine.output(request)
    assert output.error is None, output.error
    out = generated(name, prompt)
    assert same_as_generate(output.generated_tokens, out.sequences[0, len(prompt) :].tolist(), out.scores)
    return output.generated_tokens, output.cached_tokens


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
@pytest.mark.parametrize(("copies", "at"), [("row_of", 0), ("row_of", 1), ("row_of", 2), ("joined", 0), ("joined", 1)])
def test_copies_of_states_that_fail_leave_every_sequence_its_states(
    name: str, copies: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt joins sequences that decode, and for a copy of their states there is no room."""
    prompts = [stream_of_tokens(i)[: 10 + i] for i in range(4)]
    engine = Engine(model_of(name), host_budget="16MiB", block_size=4, state_budget=0)
    options: dict[str, Any] = {"min_new_tokens": 2 * NEW, "max_new_tokens": 2 * NEW, "do_sample": False}
    try:
        names = [engine.add_request(prompt, **options) for prompt in prompts[:3]]
        while not all(len(engine.output(each).generated_tokens) >= 3 for each in names):
            engine.step()
        copy, count = getattr(ragged, copies), itertools.count()

        def failing(*args: Any) -> Any:
            if next(count) == at:
                raise torch.OutOfMemoryError("out of memory")
            return copy(*args)

        monkeypatch.setattr(ragged, copies, failing)
        names.append(engine.add_request(prompts[3], **options))
        while engine.step():
            engine.check_integrity()
        assert next(count) > at
        for prompt, each in zip(prompts, names, strict=True):
            output, out = engine.output(each), generated(name, prompt, 2 * NEW)
            assert same_as_generate(output.generated_tokens, out.sequences[0, len(prompt) :].tolist(), out.scores)
            assert output.error is None or (copies == "row_of" and each == names[3])
    finally:
        engine.close()


@pytest.mark.parametrize("name", GOES_ON)
def test_a_turn_begins_where_the_last_one_ended(name: str) -> None:
    engine = Engine(model_of(name), host_budget="16MiB", block_size=4)
    try:
        assert engine.runner == "ragged"
        history = stream_of_tokens(1)[:21]
        for turn in range(4):
            answer, cached = ask(engine, name, history)
            # The last token of the answer was never computed.
            assert cached == (len(history) - 4 if turn else 0)
            history = [*history, *answer, 5 + turn, 6, 7]
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "mamba"])
def test_a_prompt_that_comes_again_is_computed_but_for_its_last_token(name: str) -> None:
    engine = Engine(model_of(name), host_budget="16MiB", block_size=4)
    try:
        prompt = stream_of_tokens(2)[:30]
        assert [ask(engine, name, prompt)[1] for _ in range(3)] == [0, 29, 29]
        assert ask(engine, name, prompt, salt="another tenant")[1] == 0
    finally:
        engine.close()


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_what_goes_on_token_by_token_does_where_that_is_sooner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact in both ways; and which of them it is, is a matter of price."""
    history = stream_of_tokens(3)[:40]
    for sooner in (True, False):
        monkeypatch.setattr(Costs, "one_by_one", lambda self, tokens, whole, sooner=sooner: sooner)
        engine = Engine(model_of(name), host_budget="16MiB", block_size=4)
        try:
            assert not engine._runner.chunked, "it goes on with many tokens at a time"
            answer, _ = ask(engine, name, history)
            turn = [*history, *answer, 8, 9]
            assert ask(engine, name, turn)[1] == (len(turn) - 3 if sooner else 0)
        finally:
            engine.close()


def test_prompts_that_begin_alike_share_what_is_before_the_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made every 8 tokens here; one of the prompts computes what is common, and the others wait for it."""
    monkeypatch.setattr(prefixes, "SPACING", 8)
    monkeypatch.setattr(prefixes, "WORTH_WAITING", 8)
    name, head = "qwen3_next", stream_of_tokens(1)[:19]
    prompts = [[*head, *stream_of_tokens(10 + i)[: 3 + i]] for i in range(4)]
    engine = Engine(model_of(name), host_budget="16MiB", block_size=4)
    try:
        names = [engine.add_request(p, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False) for p in prompts]
        while engine.step():
            engine.check_integrity()
        for prompt, each in zip(prompts, names, strict=True):
            out = generated(name, prompt)
            assert same_as_generate(
                engine.output(each).generated_tokens, out.sequences[0, len(prompt) :].tolist(), out.scores
            )
        assert [engine.output(each).cached_tokens for each in names] == [0, 16, 16, 16]
    finally:
        engine.close()


def test_copies_of_states_stay_within_their_budget() -> None:
    name = "qwen3_next"
    engine = Engine(model_of(name), host_budget="16MiB", block_size=4, state_budget="20KiB")
    try:
        kept = engine._prefixes._kept  # type: ignore[union-attr]
        one = 0
        for i in range(8):
            ask(engine, name, stream_of_tokens(i)[:20])
            one = one or kept.state_bytes // 2
            assert kept.state_bytes <= 20 * 1024
        assert 0 < kept.state_bytes < 8 * 2 * one, "nothing was given up"
    finally:
        engine.close()


def test_without_a_budget_for_states_nothing_is_used_again() -> None:
    engine = Engine(model_of("qwen3_next"), host_budget="16MiB", block_size=4, state_budget=0)
    try:
        prompt = stream_of_tokens(1)[:20]
        assert [ask(engine, "qwen3_next", prompt)[1] for _ in range(2)] == [0, 0]
    finally:
        engine.close()
    with pytest.raises(kvtier.ConfigError, match="state_budget"):
        Engine(model_of("qwen3_next"), host_budget="16MiB", state_budget=0.5)  # type: ignore[arg-type]


def test_a_conversation_goes_on_from_call_to_engine_and_from_the_disk(tmp_path: Path) -> None:
    """What a call of the store has left, the engine begins with; and so does the engine of a later process."""
    name, model = "qwen3_next", model_of("qwen3_next")
    history, ticks = stream_of_tokens(1)[:24], itertools.count()
    for process in range(2):
        store = ConversationStore(model, host_budget="16MiB", block_size=4, directory=tmp_path, loading="always")
        # By a clock that hardly goes on, no request has waited for the disk for too long.
        engine = Engine(model, store=store, clock=lambda: next(ticks) * 1e-9)
        try:
            if not process:
                out = store.generate(torch.tensor([history]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
                history = [*out[0].tolist(), 5, 6]
            answer, cached = ask(engine, name, history, conversation="alice")
            assert cached == len(history) - 3
            history = [*history, *answer]
            assert store.open("alice").ids == history
            history += [7, 8]
            store.flush()
        finally:
            engine.close()
            store.close()


def test_layers_that_hold_nothing_make_no_second_form_of_what_is_kept() -> None:
    """Of a model whose MLPs are layers of their own, calls and engines keep the same."""
    name = "nemotron_h"
    with ConversationStore(model_of(name), host_budget="16MiB", block_size=4) as store:
        engine = Engine(model_of(name), store=store)
        try:
            prompt = stream_of_tokens(3)[:24]
            out = store.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
            assert ask(engine, name, [*out[0].tolist(), 5, 6])[1] == len(prompt) + NEW - 1
            assert len({entry.key for entry in store.kept.entries.values()}) == 1
        finally:
            engine.close()


def test_what_goes_on_token_by_token_does_so_from_a_store_that_saves(tmp_path: Path) -> None:
    """Which way is sooner is asked within a change of the memory, of which what loads took is a part."""
    with ConversationStore(model_of("jamba"), host_budget="16MiB", block_size=4, directory=tmp_path) as store:
        engine = Engine(model_of("jamba"), store=store)
        try:
            prompt = stream_of_tokens(2)[:30]
            assert [ask(engine, "jamba", prompt)[1] for _ in range(2)] == [0, 29]
        finally:
            engine.close()


def test_a_request_that_is_refused_makes_no_conversation() -> None:
    store = ConversationStore(model_of("lfm2"), host_budget="16MiB", block_size=4)
    engine = Engine(store.model, store=store, max_waiting=1)
    try:
        prompt = stream_of_tokens(1)[:20]
        mine = engine.add_request(prompt, conversation="alice", request_id="x", salt="a", max_new_tokens=2)
        refused: tuple[tuple[type[kvtier.KVTierError], dict[str, Any]], ...] = (
            (kvtier.ConfigError, {"max_length": 20}),
            (kvtier.BudgetError, {"max_new_tokens": 10**7}),
            (kvtier.QueueFullError, {"max_new_tokens": 2}),
        )
        for kind, options in refused:
            with pytest.raises(kind):
                engine.add_request(prompt, conversation="bob", **options)
            assert store.names == ["alice"]
        while engine.step():
            pass
        assert engine.output(mine).finish_reason == "length"
        with pytest.raises(kvtier.ConfigError, match="another salt"):
            engine.add_request(prompt, conversation="alice", salt="b", max_new_tokens=2)
        assert not engine.load.waiting
    finally:
        engine.close()
        store.close()


@pytest.mark.parametrize("again", [False, True], ids=["forgotten", "another's"])
def test_a_conversation_that_is_forgotten_while_its_request_runs_stays_so(again: bool) -> None:
    """The request has its answer, others go on, and a new conversation of that name is what it was."""
    store = ConversationStore(model_of("lfm2"), host_budget="16MiB", block_size=4)
    engine = Engine(store.model, store=store)
    try:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        mine = engine.add_request(stream_of_tokens(1)[:20], conversation="alice", **options)
        other = engine.add_request(stream_of_tokens(2)[:20], **options | {"max_new_tokens": 2 * NEW})
        engine.step()
        store.forget("alice")
        if again:
            store.open("alice", salt="another's")
        while engine.step():
            engine.check_integrity()
        assert [engine.output(x).finish_reason for x in (mine, other)] == ["length", "length"]
        assert store.names == ["alice"] * again
        assert not again or store.open("alice", salt="another's").ids == []
    finally:
        engine.close()
        store.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_gives_up_its_blocks_goes_on_from_its_states(seed: int) -> None:
    """Room for few: requests are preempted, and come back with what is kept of them."""
    load = Load("qwen3_next", 1000 + seed)
    load.play()
    assert load.counts["requests"]


@pytest.mark.parametrize("samples", [1, 2])
def test_what_a_request_has_computed_of_other_weights_is_not_kept(samples: int) -> None:
    model, prompt = build_model("llama", "sdpa"), list(stream_of_tokens(0)[:40])
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    several = {"do_sample": True, "num_return_sequences": samples} if samples > 1 else {}
    changed = list[int]()

    def changes(output: Any) -> None:
        if len(output.generated_tokens) == 2 and not changed:
            changed.append(1)
            with torch.no_grad():
                model.get_parameter("model.layers.0.self_attn.k_proj.weight").mul_(-2)

    with Engine(model, host_budget="16MiB", block_size=4) as engine:
        name = engine.add_request(prompt, listener=changes, seed=0, **(options | several))
        assert engine.wait(name, 120).is_finished()
        assert settled(lambda: not engine.load.running and not engine.load.waiting), "the other sample goes on"
        assert changed
        for cached in (0, len(prompt) - 1):
            (output,) = engine.generate_batch([prompt], **options).values()
            assert output.generated_tokens == model.generate(torch.tensor([prompt]), **options)[0, 40:].tolist()
            assert output.cached_tokens == cached


@pytest.mark.parametrize("with_store", [False, True], ids=["its own", "of a store"])
def test_what_a_part_in_training_mode_gives_is_used_by_nobody_else(with_store: bool, tmp_path: Path) -> None:
    """It drops values at random. Not within a process, and not by way of the disk."""
    model, prompt = build_model("llama", "sdpa"), list(stream_of_tokens(0)[:40])
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    store = ConversationStore(model, directory=tmp_path, host_budget="16MiB", block_size=4) if with_store else None
    with Engine(model, store=store, **({} if with_store else {"host_budget": "16MiB", "block_size": 4})) as engine:
        for part, cached in (("layers.1", 0), ("layers.1", 0), ("", 0), ("", len(prompt) - 1), ("norm", 0)):
            model.eval()
            if part:
                model.get_submodule(f"model.{part}").train()
            (output,) = engine.generate_batch([prompt], **options).values()
            assert output.cached_tokens == cached, part
            if store is not None:
                store.flush()
                assert bool(list(tmp_path.glob("*.safetensors"))) is (part == "" or part == "norm")
    if store is not None:
        store.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_model_whose_weights_are_offloaded_is_served(name: str) -> None:
    """Between forwards they are on the meta device."""
    model, prompts = build_model(name, "sdpa"), [stream_of_tokens(i)[: 10 + 9 * i] for i in range(3)]
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    right = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    engine = Engine(model, host_budget="16MiB", block_size=4)
    try:
        assert [x.generated_tokens for x in engine.generate_batch(prompts, **options).values()] == right
    finally:
        engine.close()
