"""Rotary embeddings that are stretched with the length ("dynamic" NTK) keep how long a sequence was: in an engine each
sequence has the frequencies of its own length, and the model those that it had before."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch
import workloads
from cut_short import interrupted
from families import build_model, prompt_ids
from transformers import PreTrainedModel

from kvtier import Engine, UnsupportedError

LIMIT, NEW = 48, 8
#: Beyond where it is stretched, the longest first; one that grows beyond; and one that does not.
LENGTHS = (90, 60, 44, 20)
PROMPTS = [prompt_ids(rows=1, length=length, seed=length)[0].tolist() for length in LENGTHS]


def model_of() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=LIMIT)


def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    row = torch.tensor([prompt])
    out = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NEW, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


EXPECTED = [generated(model_of(), prompt) for prompt in PROMPTS]


def engine_of(model: PreTrainedModel) -> Engine:
    return Engine(model, host_budget="64MiB", block_size=4)


def added(engine: Engine) -> list[str]:
    return [engine.add_request(prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS]


def found(engine: Engine, names: list[str]) -> list[list[int]]:
    while engine.step():
        engine.check_integrity()
    return [list(engine.output(name).generated_tokens) for name in names]


def test_each_request_gets_the_tokens_of_generate_on_a_model_of_its_own() -> None:
    with closing(engine_of(model_of())) as engine:
        assert engine.runner == "single"
        assert found(engine, added(engine)) == EXPECTED
        assert found(engine, added(engine)) == EXPECTED


def test_the_model_goes_on_as_if_there_were_no_engine() -> None:
    model, twin = model_of(), model_of()
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3], PROMPTS[1]]
    before = generated(model, prompts[0])
    assert before == generated(twin, prompts[0])
    with closing(engine_of(model)) as engine:
        names = added(engine)
        for prompt in prompts[1:]:
            engine.step()
            assert generated(model, prompt) == generated(twin, prompt)
        assert found(engine, names) == EXPECTED
        assert generated(model, prompts[1]) == generated(twin, prompts[1])


def test_a_request_that_begins_again_divides_its_sequence_as_before() -> None:
    """Keys of tokens that were generated are of frequencies that no single forward has."""
    model, left = model_of(), 0

    def fails(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("as told")

    model.register_forward_pre_hook(fails, with_kwargs=True)
    with closing(engine_of(model)) as engine:
        mine = model.model.rotary_emb.inv_freq
        names = added(engine)
        for _ in range(5):
            engine.step()
        left = 3
        assert found(engine, names) == EXPECTED
        assert left <= 0
        assert model.model.rotary_emb.inv_freq is mine


def test_several_samples_of_a_prompt_are_those_of_generate() -> None:
    prompt = PROMPTS[1]
    with closing(engine_of(model_of())) as engine:
        name = engine.add_request(prompt, max_new_tokens=NEW, do_sample=True, top_k=1, num_return_sequences=2)
        assert found(engine, [name, f"{name}#1"]) == [EXPECTED[1]] * 2


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_engines_of_a_model_in_threads_of_their_own_have_its_frequencies_in_turn(rope: str) -> None:
    model = model_of() if rope == "dynamic" else workloads.model_of("phi3_longrope")
    right = EXPECTED if rope == "dynamic" else [generated(model, prompt) for prompt in PROMPTS]
    inside, most = list[int](), list[int]()

    def enters(*_: Any) -> None:
        inside.append(threading.get_ident())
        time.sleep(0.001)
        most.append(len(set(inside)))

    def leaves(*_: Any) -> None:
        inside.remove(threading.get_ident())

    embedding, engines = model.model.rotary_emb, [engine_of(model) for _ in range(2)]
    mine = embedding.inv_freq, embedding.inv_freq.clone()
    with embedding.register_forward_pre_hook(enters), embedding.register_forward_hook(leaves):
        for engine in engines:
            engine.start()
        names = [added(engine) for engine in engines]
        for engine, those in zip(engines, names, strict=True):
            assert [engine.wait(name, timeout=60).generated_tokens for name in those] == right
        for engine in engines:
            engine.close()
    assert set(most) == {1}
    if rope == "dynamic":
        assert embedding.inv_freq is mine[0]
        assert torch.equal(*mine)


def test_an_interrupt_whose_traceback_is_kept_leaves_no_other_engine_waiting() -> None:
    """As an interactive Python keeps the last one. It comes as a context begins or ends, whose generator that keeps
    alive."""
    model, kept, left = model_of(), list[KeyboardInterrupt](), 0

    def returns(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "return"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return returns

    def steps() -> None:
        before = sys.gettrace()
        try:
            sys.settrace(lambda frame, event, arg: returns if frame.f_code.co_filename == contextlib.__file__ else None)
            engine.step()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(before)

    with closing(engine_of(model)) as engine, closing(engine_of(model)) as other:
        names, mine = added(engine), model.model.rotary_emb.inv_freq
        try:
            for at in range(1, 100):
                left = at
                steps()
                theirs = other.add_request(PROMPTS[1], max_new_tokens=1, do_sample=False)
                thread = threading.Thread(target=other.step, daemon=True)
                thread.start()
                thread.join(10)
                assert not thread.is_alive(), "it waits for its turn"
                assert other.output(theirs).generated_tokens == EXPECTED[1][:1]
                if left > 0:
                    break
            assert len(kept) > 5
            assert found(engine, names) == EXPECTED
        finally:
            kept.clear()
            gc.collect()  # else a failure would wait, too
        assert model.model.rotary_emb.inv_freq is mine


@pytest.mark.parametrize("left", range(1, 60, 7))
def test_an_interrupt_costs_nobody_a_token_and_leaves_the_model_as_it_was(left: int) -> None:
    model = model_of()
    with closing(engine_of(model)) as engine:
        mine, names = model.model.rotary_emb.inv_freq, added(engine)
        for _ in range(3):
            engine.step()
        interrupted(engine.step, left, "serving/runners/single.py")
        interrupted(engine.step, left, "hf/models/rotary.py")
        assert found(engine, names) == EXPECTED
        assert model.model.rotary_emb.inv_freq is mine


def test_nobody_puts_such_sequences_into_one_forward() -> None:
    for runner in ("packed", "ragged"):
        with pytest.raises(UnsupportedError, match="longest sequence of a forward"):
            Engine(model_of(), host_budget="64MiB", runner=runner)
