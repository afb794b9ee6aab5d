"""Engines, stores, memories and handles on one model end in any order; what is still used is left as it is."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from typing import Any

import pytest
import torch
from families import build_model, tiny_model

import kvtier
from kvtier import (
    ConfigError,
    ConversationStore,
    Engine,
    MemoryInUseError,
    QueueFullError,
    StoreInUseError,
    TieredKVCache,
    TieredMemory,
    UnsupportedError,
)
from kvtier.hf.attention import enable

PROMPT = list(range(1, 12))
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def model_of() -> Any:
    return build_model("llama", "sdpa")


def answer(engine: Engine) -> list[int]:
    (output,) = engine.generate_batch([PROMPT], **OPTIONS).values()
    assert output.error is None
    return output.generated_tokens


def expected(model: Any) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), pad_token_id=0, **OPTIONS)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("first", [0, 1])
def test_an_engine_goes_on_after_another_one_of_its_model_is_closed(first: int) -> None:
    model = model_of()
    want = expected(model)
    engines = [Engine(model, host_budget="8MiB") for _ in range(2)]
    engines[first].close()
    assert answer(engines[1 - first]) == want
    engines[1 - first].close()
    assert model.config._attn_implementation == "sdpa"


def test_an_engine_is_packed_though_another_one_of_its_model_is_closed_while_it_tries_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of a forward, whose mask is that of one implementation."""
    model = model_of()
    before, closing, comes = Engine(model, host_budget="8MiB"), list[threading.Thread](), threading.Event()
    changes = enable._changing

    def changing() -> contextlib.AbstractContextManager[None]:
        if threading.current_thread() in closing:
            comes.set()
        return changes()

    monkeypatch.setattr(enable, "_changing", changing)

    def close(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[1] == 3 and not closing:  # a chunk behind others
            closing.append(threading.Thread(target=before.close))
            closing[0].start()
            assert comes.wait(60)
            closing[0].join(0.1)  # it waits for this forward, or is through at once

    with model.model.layers[0].register_forward_pre_hook(close), Engine(model, host_budget="8MiB") as engine:
        closing[0].join(60)
        assert before.closed
        assert engine.runner == "packed"
    assert model.config._attn_implementation == "sdpa"


def test_an_engine_goes_on_after_the_block_that_enabled_its_model() -> None:
    model = model_of()
    want = expected(model)
    with kvtier.enable(model):
        engine = Engine(model, host_budget="8MiB")
    assert answer(engine) == want
    engine.close()
    assert model.config._attn_implementation == "sdpa"


def test_disabling_what_an_engine_runs_is_refused_and_a_copy_is_free() -> None:
    model = model_of()
    kvtier.enable(model)
    with Engine(model, host_budget="8MiB") as engine:
        with pytest.raises(UnsupportedError, match="an Engine runs this"):
            kvtier.disable(model)
        clone = copy.deepcopy(model)
        kvtier.disable(clone)
        assert clone.config._attn_implementation == "sdpa"
        answer(engine)
    assert model.config._attn_implementation == "kvtier"
    kvtier.disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_that_is_changed_under_an_engine_is_told() -> None:
    model = model_of()
    with Engine(model, host_budget="8MiB") as engine:
        model.set_attn_implementation("sdpa")
        (output,) = engine.generate_batch([PROMPT], **OPTIONS).values()
        assert isinstance(output.error, UnsupportedError)
        assert "attention implementation was changed" in str(output.error)
        model.set_attn_implementation("kvtier")
        answer(engine)


@pytest.mark.parametrize("used", [False, True])
def test_a_store_is_not_closed_under_an_engine(used: bool) -> None:
    model = model_of()
    store = ConversationStore(model, host_budget="8MiB")
    engine = Engine(model, store=store)
    if used:
        answer(engine)
    with pytest.raises(StoreInUseError, match="close that first"):
        store.close()
    store.generate(torch.tensor([PROMPT]), pad_token_id=0, **OPTIONS)
    answer(engine)
    engine.close()
    store.close()
    assert store.closed
    assert store.memory.closed


@pytest.mark.parametrize("last", ["what is kept", "the runner", "neither"])
@pytest.mark.parametrize("stored", [False, True])
def test_an_engine_that_is_dropped_leaves_nothing_in_a_memory_of_others(stored: bool, last: str) -> None:
    """With its store, in the midst of a request that goes on with what is kept, in whichever order both end."""
    model, prompt = model_of(), list(range(1, 40))
    with TieredMemory(host_budget="8MiB") as memory:
        given = {"store": ConversationStore(model, memory=memory)} if stored else {"memory": memory}
        engine = Engine(model, **given)  # type: ignore[arg-type]
        engine.generate_batch([prompt], **OPTIONS)
        request = engine._requests.named[engine.add_request([*prompt, 1, 2], **OPTIONS)]
        while not request.output.generated_tokens:
            engine.step()
        assert request.output.cached_tokens
        assert engine._prefixes is not None
        kept, forward = engine._prefixes._kept, engine._runner.forward  # type: ignore[attr-defined]
        held = {"what is kept": [kept], "the runner": [forward], "neither": []}[last]
        del kept, forward, engine, given, request
        gc.collect()
        memory.check_integrity()
        with TieredKVCache(model.config, memory=memory) as cache:
            model(torch.tensor([prompt]), past_key_values=cache)
        held.clear()
        gc.collect()
        memory.check_integrity()
        assert not memory.owners
    model.set_attn_implementation("sdpa")


def test_leaving_a_memory_that_is_used_hides_no_error() -> None:
    model = model_of()
    memory = TieredMemory(host_budget="8MiB")
    cache = TieredKVCache(model.config, memory=memory)
    model(torch.tensor([PROMPT]), past_key_values=cache)
    with pytest.raises(KeyError) as raised, memory:
        raise KeyError
    assert "in use" in raised.value.__notes__[0]
    assert not memory.closed
    with pytest.raises(MemoryInUseError, match="not closed: 1"), memory:
        pass
    cache.close()
    with memory:
        pass
    assert memory.closed


@pytest.mark.parametrize(
    "prompt", ["hello", {"input_ids": PROMPT}, None, 5, [1.9, 2.2], torch.tensor([1.5]), [[1], [2]], ["1"]], ids=repr
)
def test_what_is_no_prompt_is_refused_before_anything_runs(prompt: Any) -> None:
    with Engine(model_of(), host_budget="8MiB") as engine:
        with pytest.raises(ConfigError, match="A prompt is token ids"):
            engine.add_request(prompt, **OPTIONS)
        with pytest.raises(ConfigError, match="A prompt is token ids"):
            engine.generate_batch([PROMPT, prompt], **OPTIONS)
        answer(engine)
        assert engine.add_request(torch.tensor([PROMPT]), **OPTIONS)


def test_a_token_that_the_model_does_not_have_fails_nobody_else() -> None:
    model = tiny_model("llama")
    with Engine(model, host_budget="8MiB") as engine:
        for wrong in (model.config.vocab_size, -1):
            with pytest.raises(ConfigError, match=f"{wrong} is none"):
                engine.add_request([1, wrong, 2], **OPTIONS)
        engine.add_request([1, model.config.vocab_size - 1, 2], **OPTIONS)
        answer(engine)


def test_a_model_that_does_not_say_how_many_tokens_it_has_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    want = expected(model)

    def unknown(self: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(type(model), "get_input_embeddings", unknown)
    with Engine(model, host_budget="8MiB") as engine:
        assert answer(engine) == want


def test_what_is_refused_names_the_way_out() -> None:
    with Engine(model_of(), host_budget="8MiB", max_waiting=1) as engine:
        engine.stop()
        with pytest.raises(UnsupportedError, match=r"num_beams=3.*`model.generate`"):
            engine.add_request(PROMPT, num_beams=3)
        with pytest.raises(ConfigError, match="Did you mean max_new_tokens"):
            engine.add_request(PROMPT, max_new_token=3)
        engine.add_request(PROMPT, **OPTIONS)
        with pytest.raises(QueueFullError, match="larger max_waiting"):
            engine.add_request(PROMPT, **OPTIONS)
