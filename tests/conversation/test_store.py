"""What a store re-uses and what it does not, and that it says why; what happens where something goes wrong."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from families import VOCAB, build_model, dynamic_cache, tiny_model
from test_turns import check_kept
from transformers import BartConfig, BartForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvtier import (
    BudgetError,
    ClosedError,
    ConcurrentUseError,
    ConfigError,
    ConversationStore,
    MismatchError,
    TieredKVCache,
    TieredMemory,
    UnsupportedError,
)
from kvtier.config import format_size
from kvtier.conversation.conversation import Conversation
from kvtier.hf.models import generation, trials
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.names import CACHE

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}


def some_ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator("cpu").manual_seed(seed))


def ones(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def fresh(model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """The oracle: what a new cache gives."""
    out: torch.Tensor = model.generate(**inputs, past_key_values=dynamic_cache(model), **(GREEDY | options))
    return out


def store_of(model: Any, **options: Any) -> ConversationStore:
    return ConversationStore(model, **({"host_budget": "64MiB", "block_size": 8, "loading": "always"} | options))


def grown(out: torch.Tensor, tokens: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.cat([out, some_ids(tokens, len(out), seed)], 1)


# What is re-used


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "mistral_sliding"])
def test_a_turn_continues_all_but_the_last_token_of_the_turn_before(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        ids = some_ids(40)
        for _ in range(3):
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            ids = grown(out)
        assert store.reuse[0].cached == 40 + 2 * 10 - 4 - 1
        assert store.reuse[0].why == ""
        assert store.stats.sequences == 1, "a turn takes the place of the one before"
        store.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_the_same_prompt_again_computes_its_last_token(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        for n in range(3):
            out = store.generate(**inputs, **GREEDY)
            assert torch.equal(out, fresh(model, inputs))
            assert store.reuse[0].cached == (39 if n else 0)


def test_the_rows_of_a_padded_batch_continue_what_each_has() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        long, short = some_ids(21), some_ids(13, seed=5)
        a, b = (store.generate(**ones(x), **GREEDY) for x in (long, short))
        rows = grown(a), grown(b)
        width = max(x.shape[1] for x in rows)
        ids, mask = (torch.zeros(2, width, dtype=torch.long) for _ in range(2))
        for i, x in enumerate(rows):
            ids[i, width - x.shape[1] :], mask[i, width - x.shape[1] :] = x, 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        for n in range(2):
            out = store.generate(**inputs, **GREEDY)
            assert torch.equal(out, fresh(model, inputs))
            # All rows begin at one column: that up to which every row is there.
            assert [row.cached for row in store.reuse] == ([26, 18] if not n else [30, 22])
            store.check_integrity()
        out = store.generate(**ones(out[1:, 8:]), **GREEDY)
        assert store.reuse[0].computed == 1, "without its padding it is what it was"


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_of_states_nothing_is_read_for_padded_rows_and_that_is_said(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name), some_ids(30, rows=2)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids[1:]), **GREEDY)
    inputs = ones(ids)
    inputs["attention_mask"][0, :7] = 0
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert [row.why for row in store.reuse] == ["the padding is part of the states that layers keep"] * 2
        assert store.stats.sequences == 0, "what is of no use was read from the disk"


def test_beams_and_several_sequences_continue_one_prompt_that_is_there_once() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        ids = some_ids(64)
        store.generate(**ones(ids), **GREEDY)
        blocks = store.memory.stats.host.used_blocks
        for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 3}):
            out = store.generate(**ones(ids), **(GREEDY | options))
            assert torch.equal(out, fresh(model, ones(ids), **options))
            assert store.reuse[0].cached == 63
        assert store.memory.stats.host.used_blocks <= blocks + 3 * 2 * 8
        store.check_integrity()
        check_kept(store, model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_the_rows_of_a_batch_continue_together_what_each_left(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        ids = torch.cat([some_ids(30), some_ids(30, seed=9)])
        for n in range(3):
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            assert [row.cached for row in store.reuse] == ([ids.shape[1] - 5] * 2 if n else [0, 0])
            ids = grown(out)
        alone = store.generate(**ones(ids[1:]), **(GREEDY | {"num_beams": 2}))
        assert torch.equal(alone, fresh(model, ones(ids[1:]), num_beams=2))
        assert store.reuse[0].cached == ids.shape[1] - 5
        check_kept(store, model)


def test_sampling_and_candidates_continue_too() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        ids = some_ids(40)
        store.generate(**ones(ids), **GREEDY)
        for options in ({"do_sample": True, "temperature": 0.7}, {"prompt_lookup_num_tokens": 3}):
            torch.manual_seed(3)
            out = store.generate(**ones(ids), **(GREEDY | options))
            torch.manual_seed(3)
            assert torch.equal(out, fresh(model, ones(ids), **options))
            if "prompt_lookup_num_tokens" in options:
                assert "assisted" in store.reuse[0].why
            else:
                assert store.reuse[0].cached == 39
            ids = grown(out)
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
            assert store.reuse[0].cached == ids.shape[1] - 5, "what was dropped of the candidates is not there"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_candidates_left_behind_is_of_no_harm(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        ids = some_ids(4).repeat(1, 10)  # so that candidates are found, and some are right
        for _ in range(3):
            out = store.generate(**ones(ids), **(GREEDY | {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}))
            ids = grown(out)
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            ids = grown(out)
        store.check_integrity()
        check_kept(store, model)


def test_a_way_to_generate_that_begins_with_the_whole_prompt_is_noticed() -> None:
    model = tiny_model("llama")

    def own(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        logits = model(input_ids=input_ids, use_cache=True, **{CACHE: inputs[CACHE]}).logits
        return torch.cat([input_ids, logits[:, -1:].argmax(-1)], 1)

    with store_of(model) as store:
        inputs = ones(some_ids(40))
        store.generate(**inputs, **GREEDY)
        out = store.generate(**inputs, custom_generate=own, **GREEDY)
        assert torch.equal(out, fresh(model, inputs, max_new_tokens=1))
        assert "rest of the prompt" in store.reuse[0].why


def test_a_prompt_that_generate_changes_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build_model("gemma3", "sdpa"), some_ids(40)
    monkeypatch.setattr(model, "heal_tokens", lambda ids, tokenizer: ids.index_fill(1, torch.tensor([0]), 0))
    with store_of(model) as store:
        for _ in range(2):
            out = store.generate(**ones(ids), token_healing=True, **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids), token_healing=True))
            assert "token_healing" in store.reuse[0].why
        assert store.stats.sequences == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_way_to_generate_that_shortens_the_prompt_is_noticed(name: str) -> None:
    model, ids = tiny_model(name), some_ids(40)

    def own(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        past = inputs[CACHE].get_seq_length()
        logits = model(input_ids=input_ids[:, past:-5], use_cache=True, **{CACHE: inputs[CACHE]}).logits
        return torch.cat([input_ids[:, :-5], logits[:, -1:].argmax(-1)], 1)

    with store_of(model) as store:
        store.generate(**ones(ids[:, :30]), **GREEDY)
        out = store.generate(**ones(ids), custom_generate=own, **GREEDY)
        assert torch.equal(out, fresh(model, ones(ids[:, :-5]), max_new_tokens=1))
        assert "rest of the prompt" in store.reuse[0].why


def test_a_shared_beginning_is_there_once() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        system = some_ids(80)
        store.generate(**ones(system), **GREEDY)
        before = store.memory.stats.host.used_blocks
        for n in range(20):
            store.generate(**ones(torch.cat([system, some_ids(7, seed=100 + n)], 1)), **GREEDY)
            assert store.reuse[0].cached >= 80
        layers = model.config.num_hidden_layers
        assert store.memory.stats.host.used_blocks - before == 20 * layers * 2, (
            "what comes behind takes two blocks each"
        )
        store.check_integrity()


# What is not


@pytest.mark.parametrize("salts", [("a", "b"), (None, "a"), ("a", None)])
def test_other_salts_share_nothing_and_the_same_shares_all(salts: tuple[Any, Any]) -> None:
    with store_of(tiny_model("llama")) as store:
        inputs = ones(some_ids(40))
        for salt, cached in ((salts[0], 0), (salts[1], 0), (salts[0], 39), (salts[1], 39)):
            store.generate(**inputs, salt=salt, **GREEDY)
            assert store.reuse[0].cached == cached


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m, x: {"inputs_embeds": m.get_input_embeddings()(x["input_ids"])}, "no token ids"),
        (lambda m, x: x | {"position_ids": torch.arange(40)[None]}, "position_ids"),
        (lambda m, x: x | {"use_cache": False}, "use_cache"),
        (lambda m, x: x | {"output_hidden_states": True}, "is asked for"),
        (lambda m, x: x | {"attention_mask": x["attention_mask"].index_fill(1, torch.tensor([20]), 0)}, "left padding"),
    ],
)
def test_what_is_not_of_token_ids_alone_re_uses_nothing_and_says_so(change: Any, why: str) -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        store.generate(**inputs, **GREEDY)
        others = change(model, inputs)
        out = store.generate(**others, **GREEDY)
        again = {name: x for name, x in others.items() if name != "use_cache"}
        assert torch.equal(out, fresh(model, again))
        assert why in store.reuse[0].why
        assert store.stats.sequences == 1


def test_other_weights_find_nothing() -> None:
    model = build_model("llama", "sdpa")
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        store.generate(**inputs, **GREEDY)
        with torch.no_grad():
            model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(-1)
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].cached == 0
        store.generate(**inputs, **GREEDY)
        assert store.reuse[0].cached == 39


def test_another_adapter_finds_nothing_of_the_first() -> None:
    model = build_model("llama", "sdpa")
    layer = model.get_submodule("model.layers.0.self_attn.v_proj")
    layer.base_layer = torch.nn.Identity()  # as adapters look
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        for names, off, cached in ((["a"], False, 0), (["b"], False, 0), (["a"], True, 0), (["a"], False, 39)):
            layer.active_adapters, layer.disable_adapters = names, off  # type: ignore[assignment]
            store.generate(**inputs, **GREEDY)
            assert store.reuse[0].cached == cached


def test_keys_that_depend_on_the_length_are_not_continued_beyond_it() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    # Transformers stretches the embedding when a sequence grows, and does not take that back: the oracle sees the same.
    model, twin = (build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=48) for _ in range(2))
    with store_of(model) as store:
        ids = some_ids(30)
        for _ in range(5):
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(twin, ones(ids)))
            if ids.shape[1] + 6 > 48:
                assert "positions depend on the length" in store.reuse[0].why
            ids = grown(out)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_of_the_callers_own_is_refused(name: str) -> None:
    model = tiny_model("llama")
    with store_of(model) as store, pytest.raises(ConfigError, match="brings its own cache"):
        store.generate(**ones(some_ids(9)), **{name: TieredKVCache(model.config)}, **GREEDY)


def test_a_config_of_the_hub_that_asks_for_the_cache_of_before_is_not_refused() -> None:
    """Of Gemma 2 and 3, it says "hybrid", which Transformers leaves out."""
    model, inputs = build_model("gemma3", "sdpa"), ones(some_ids(20))
    expected = fresh(model, inputs)
    model.generation_config.cache_implementation = "hybrid"
    with store_of(model) as store:
        for cached in (0, 19):
            assert torch.equal(store.generate(**inputs, **GREEDY), expected)
            assert store.reuse[0].cached == cached
        model.generation_config.cache_implementation = "static"
        with pytest.raises(ConfigError, match=r"cache_implementation='static'.*model\.generation_config"):
            store.generate(**inputs, **GREEDY)


def test_positions_that_count_the_padding_are_of_no_use_to_others() -> None:
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=32, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        forced_eos_token_id=None, decoder_start_token_id=1, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BartForCausalLM(config).eval()
    with store_of(model) as store:
        long, short = some_ids(30), some_ids(20, seed=4)
        ids = torch.cat([long, torch.cat([torch.zeros(1, 10, dtype=torch.long), short], 1)])
        store.generate(input_ids=ids, attention_mask=(ids != 0).long(), **GREEDY)
        assert "padding" in store.reuse[0].why
        assert torch.equal(store.generate(**ones(short), **GREEDY), fresh(model, ones(short)))
        assert store.reuse[0].cached == 0


def test_positions_that_a_model_remembers_are_not_continued() -> None:
    model = build_model("llama", "sdpa")
    model.model.rope_deltas = None  # as models of images have it
    with store_of(model) as store:
        for _ in range(2):
            store.generate(**ones(some_ids(20)), **GREEDY)
            assert "keeps positions" in store.reuse[0].why


def test_what_was_computed_under_autocast_is_of_use_there_only() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        inputs = ones(some_ids(30))
        for cast, cached in ((True, 0), (False, 0), (True, 29), (False, 29)):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                out = store.generate(**inputs, **GREEDY)
            assert store.reuse[0].cached == cached
            assert cast or torch.equal(out, fresh(model, inputs))


def in_mixed_precision(model: Any) -> None:
    """As Accelerate prepares a model."""
    cast: Any = torch.autocast("cpu", torch.bfloat16)
    model.forward = MethodType(convert_outputs_to_fp32(cast(model.forward.__func__)), model)


def test_what_a_forward_computes_under_an_autocast_of_its_own_is_of_use_there_only() -> None:
    model = build_model("llama", "sdpa")
    with store_of(model) as store:
        inputs = ones(some_ids(30))
        for cast, cached in ((True, 0), (False, 0), (True, 29), (False, 29)):
            if cast:
                in_mixed_precision(model)
            out = store.generate(**inputs, **GREEDY)
            assert store.reuse[0].cached == cached
            assert cast or torch.equal(out, fresh(model, inputs))
            vars(model).pop("forward", None)


def test_a_longer_sequence_leaves_no_keys_for_a_shorter_one() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model, twin = (build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=48) for _ in range(2))
    with store_of(model) as store:
        for inputs in (ones(some_ids(70)), ones(some_ids(70)[:, :30])):
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(twin, inputs))


def test_weights_that_change_in_the_midst_of_a_call_leave_nothing() -> None:
    model = build_model("llama", "sdpa")

    class Changes(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                model.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(-1)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with store_of(model) as store:
        store.generate(**ones(some_ids(30)), stopping_criteria=StoppingCriteriaList([Changes()]), **GREEDY)
        assert store.stats.sequences == 0


# What goes wrong


def test_a_model_in_another_dtype_begins_with_nothing() -> None:
    model = build_model("llama", "sdpa")
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        store.generate(**inputs, **GREEDY)
        model.to(torch.bfloat16)
        for cached in (0, 39):
            out = store.generate(**inputs, **GREEDY, return_dict_in_generate=True)
            assert out.reuse[0].cached == cached
            assert out.past_key_values is None
        store.check_integrity()


def test_what_keeping_fails_with_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        inputs = ones(some_ids(20))

        def fails(*_: Any, **__: Any) -> None:
            raise MismatchError("not now")

        monkeypatch.setattr(store._kept, "keep", fails)
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.stats.problem == "not now"


def test_a_store_that_nobody_closes_gives_all_back() -> None:
    memory = TieredMemory(host_budget="16MiB")
    store = store_of(build_model("llama", "sdpa"), memory=memory, host_budget=None)
    store.generate(**ones(some_ids(40)), **GREEDY)
    gone = weakref.ref(store.model)
    del store
    gc.collect()
    memory.check_integrity()
    assert memory.stats.host.used_blocks == 0
    assert gone() is None
    memory.close()


def test_a_cache_that_was_dropped_under_the_lock_does_not_stop_a_store_from_closing() -> None:
    model = tiny_model("llama")
    store = store_of(model)
    store.generate(**ones(some_ids(40)), **GREEDY)
    cache = store.caches.new()
    (entry,) = store._kept.entries.values()
    cache._forward.follow(store._kept.parked, [entry.sequence], 10)
    with store.memory.lock:
        del cache
        gc.collect()
    store.close()
    assert store.closed


def test_copies_of_states_have_a_budget() -> None:
    model = tiny_model("mistral_sliding")
    with store_of(model, state_budget=100_000) as store:
        for seed in range(30):
            inputs = ones(some_ids(20, seed=seed))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            assert store.stats.state_bytes <= 100_000
        store.generate(**inputs, **GREEDY)
        assert store.reuse[0].cached == 19
        store.check_integrity()


def test_with_no_budget_for_states_nothing_of_a_model_that_has_them_is_used_again() -> None:
    for name, again in (("gemma3", 0), ("llama", 19)):
        model, inputs = tiny_model(name), ones(some_ids(20))
        with store_of(model, state_budget=0) as store:
            for _ in range(2):
                assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
                assert store.stats.state_bytes == 0
            assert store.reuse[0].cached == again
            store.check_integrity()


def test_a_store_says_what_it_has_in_a_line() -> None:
    with store_of(tiny_model("llama")) as store:
        store.open("a").generate(**ones(some_ids(20)), **GREEDY)
        store.open("b").generate(**ones(some_ids(20)), **GREEDY)
        held = format_size(store.memory.stats.host.bytes)
        assert repr(store) == f"ConversationStore(2 conversations, host {held} of 64 MiB)"
    assert repr(store) == "ConversationStore(closed)"


def test_one_sequence_whose_states_are_more_than_their_budget_is_not_kept() -> None:
    model = tiny_model("gemma3")
    with store_of(model, state_budget=100) as store:
        for _ in range(2):
            inputs = ones(some_ids(20))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            assert store.stats.state_bytes == store.stats.sequences == store.reuse[0].cached == 0
            store.check_integrity()


def test_a_model_whose_states_begin_again_is_found_out() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model("qwen3_next", "sdpa").to(dtype)
        assert trials.tried_states(model) == (True, True)
        forward = model.forward

        def begins_again(*args: Any, forward: Any = forward, **inputs: Any) -> Any:
            cache = inputs.get(CACHE)
            if cache is not None and inputs["input_ids"].shape[1] > 1 and cache.get_seq_length():
                for layer in cache.layers:
                    for state in getattr(layer, "recurrent_states", {}).values():
                        state.zero_()
            return forward(*args, **inputs)

        model.forward = begins_again
        assert not trials.tried_states(model).go_on


@pytest.mark.parametrize(
    "wrong", [{"salt": []}, {"generation_config": GenerationConfig(cache_implementation="static", max_new_tokens=2)}]
)
def test_what_cannot_be_is_said(wrong: dict[str, Any]) -> None:
    with store_of(tiny_model("llama")) as store, pytest.raises(ConfigError):
        store.generate(**ones(some_ids(9)), **wrong)


def test_a_model_that_is_wrapped_to_train_in_several_processes_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"object of DataParallel, .*Give the model inside it, `\.module`\."):
        store_of(torch.nn.DataParallel(tiny_model("llama")))


def test_arguments_that_cannot_be_are_refused_before_anything_is_made() -> None:
    with store_of(tiny_model("llama")) as store:
        salt: Any = [1]
        calls: list[Callable[[], object]] = [
            lambda: store.open("x", salt=salt, pinned=True),
            lambda: store.park([1, 2], salt=salt),
            lambda: store.drop([1, 2, 3], 0, 1, salt=salt),
            lambda: store.wake([1, 2], salt=salt),
            lambda: store.drop([1, 2, 3], 0, 1.5),  # type: ignore[arg-type]
            lambda: store.verify(-1),
            lambda: store.verify(1.5),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="give"):
                call()
        assert store.names == []
        chat = store.open("y")
        chat.messages = [{"role": "assistant", "content": "Hello."}]
        with pytest.raises(ConfigError, match="no answer"):
            chat.regenerate(tokenizer=Tokenizer(), **GREEDY)
        assert len(chat.messages) == 1


def test_a_call_looks_at_all_modules_when_it_begins_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes time in their number, which of a model with adapters is a thousand."""
    model, looks, modules = tiny_model("llama"), list[int](), dependence._modules

    def counted(model: Any) -> list[Any]:
        looks.append(1)
        return modules(model)

    monkeypatch.setattr(dependence, "_modules", counted)
    with store_of(model) as store:
        chat, inputs = store.open("a"), ones(some_ids(20))
        for _ in range(2):
            looks.clear()
            chat.generate(**inputs, **GREEDY)
            assert len(looks) == 2
            looks.clear()
            store.generate(**inputs, **GREEDY)
            assert len(looks) == 2
    assert modules(model) == list(model.modules())


class Breaks(StoppingCriteria):
    """Raises after some tokens."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.at:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_a_broken_call_has_computed_is_continued_or_dropped(name: str, error: type[BaseException]) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        inputs = ones(some_ids(40))
        with pytest.raises(error):
            store.generate(**inputs, stopping_criteria=StoppingCriteriaList([Breaks(43, error)]), **GREEDY)
        store.check_integrity()
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        if name == "llama":
            assert store.reuse[0].cached == 39


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("device_budget", [None, 30_000])
def test_without_room_the_longest_unused_goes_and_tokens_stay_right(name: str, device_budget: int | None) -> None:
    model, rng = tiny_model(name), random.Random(1)
    with store_of(model, host_budget=60_000, device_budget=device_budget) as store:
        chats = [some_ids(20, seed=n) for n in range(6)]
        for _ in range(20):
            n = rng.randrange(len(chats))
            out = store.generate(**ones(chats[n]), **GREEDY)
            assert torch.equal(out, fresh(model, ones(chats[n])))
            chats[n] = grown(out)[:, :60] if out.shape[1] < 50 else some_ids(20, seed=rng.randrange(1000))
            store.check_integrity()
            stats = store.memory.stats
            assert stats.host.bytes <= stats.host.budget
        assert store.stats.dropped


def test_a_store_on_a_memory_of_others_gives_way_to_them() -> None:
    model = tiny_model("llama")
    memory = TieredMemory(host_budget=170_000)
    with store_of(model, memory=memory, host_budget=None) as store:
        for n in range(6):
            store.generate(**ones(some_ids(40, seed=n)), **GREEDY)
        with TieredKVCache(model.config, memory=memory, block_size=8) as cache:
            ids = some_ids(250, seed=77)
            out = model.generate(**ones(ids), past_key_values=cache, **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            store.check_integrity()
        assert store.stats.dropped
    memory.check_integrity()
    memory.close()


def test_threads_have_the_tokens_of_a_new_cache() -> None:
    model, errors = tiny_model("llama"), list[BaseException]()
    with store_of(model, device_budget=600_000) as store:

        def chat(seed: int) -> None:
            try:
                ids = torch.cat([some_ids(24), some_ids(5, seed=seed)], 1)
                for _ in range(4):
                    out = store.generate(**ones(ids), **GREEDY)
                    assert torch.equal(out, fresh(model, ones(ids)))
                    ids = grown(out, seed=seed)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        store.check_integrity()
        assert store.stats.cached_tokens > store.stats.prompt_tokens / 2


def test_a_store_that_is_closed_is_closed_and_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    hooks = len(model._forward_pre_hooks)
    store = store_of(model)
    chat = store.open("a")
    store.close()
    store.close()
    assert len(model._forward_pre_hooks) == hooks
    for use in (lambda: store.generate(some_ids(9)), store.clear, lambda: chat.generate(some_ids(9))):
        with pytest.raises(ClosedError):
            use()


# Conversations


class Tokenizer:
    """A token for each letter; messages follow each other between marks."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        found = []
        for message in messages:
            found += [1, *(2 + ord(x) % (VOCAB - 2) for x in message["content"]), 1]
        return found

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return "".join(chr(int(x) + VOCAB - 4) for x in ids)


def test_a_conversation_is_continued_forked_rewound_and_answered_again() -> None:
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model) as store:
        chat = store.open("alice")
        assert store.open("alice") is chat
        first = chat.send("Who are you?", tokenizer=tokenizer, system="Be brief.", **GREEDY)
        second = chat.send("And what?", tokenizer=tokenizer, **GREEDY)
        assert chat.reuse is not None
        assert chat.reuse.cached >= 12 + 2 * 2 + 9
        again = chat.regenerate(tokenizer=tokenizer, **GREEDY)
        assert again == second
        assert chat.reuse.computed <= 2
        twin = chat.fork("bob")
        assert twin.messages == chat.messages
        twin.rewind(turns=1)
        assert twin.messages[-1]["content"] == first
        twin.send("And what?", tokenizer=tokenizer, **GREEDY)
        assert twin.messages == chat.messages
        assert twin.reuse is not None
        assert twin.reuse.computed <= 2
        chat.park()
        store.check_integrity()
        chat.close()
        assert store.names == ["bob"]
        with pytest.raises(ClosedError):
            chat.send("?", tokenizer=tokenizer)
        for wrong in ({}, {"tokens": 1, "turns": 1}, {"tokens": 10**6}, {"turns": -1}):
            with pytest.raises(ConfigError):
                twin.rewind(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            store.open("")


def test_two_threads_in_one_conversation_are_refused() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        chat, met = store.open("a"), list[BaseException]()

        class Meets(StoppingCriteria):
            def __call__(self, *_: Any, **__: Any) -> Any:
                def other() -> None:
                    try:
                        chat.generate(**ones(some_ids(9)), **GREEDY)
                    except BaseException as error:
                        met.append(error)

                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
                return torch.zeros(1, dtype=torch.bool)

        chat.generate(**ones(some_ids(9)), stopping_criteria=StoppingCriteriaList([Meets()]), **GREEDY)
        assert met
        assert all(isinstance(error, ConcurrentUseError) for error in met)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_re_used_makes_no_call_fail_that_has_room_without(name: str) -> None:
    """A layer that is read takes room for its dense copy, for each row; a prompt that is computed whole takes none."""
    model, begin = tiny_model(name), some_ids(33)
    inputs, options = (
        ones(grown(begin.repeat(2, 1), 1)),
        {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 1},
    )
    right, why = fresh(model, inputs, **options), set()
    for budget in range(12_000, 80_000, 2_000):
        with store_of(model, device_budget=budget, host_attention=False) as store:
            cache = TieredKVCache(model.config, memory=store.memory, block_size=8, host_attention=False)
            try:
                with cache:
                    model.generate(**inputs, past_key_values=cache, **(GREEDY | options))
            except BudgetError:
                continue
        with store_of(model, device_budget=budget, host_attention=False) as store:
            store.generate(**ones(begin), **(GREEDY | {"max_new_tokens": 1}))
            assert torch.equal(store.generate(**inputs, **(GREEDY | options)), right)
            assert store.reuse[0].cached in (0, 32, 33)
            why.add(store.reuse[0].why)
            store.check_integrity()
    assert why == {"", "no room for what is kept and the rest of the call"}


def test_a_streamer_is_told_a_prompt_once_though_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves the prompt out of what it shows expects it first, and would show it as the answer."""
    model, begin = tiny_model("llama"), some_ids(20)
    prepare, told = model.prepare_inputs_for_generation, list[list[int]]()

    @functools.wraps(prepare)
    def whole(ids: torch.Tensor, **options: Any) -> Any:
        monkeypatch.undo()  # of the first forward only
        return prepare(ids, **options) | {"input_ids": ids}

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            told.append(value.reshape(-1).tolist())

        def end(self) -> None:
            told.append([])

    with store_of(model) as store:
        inputs = ones(grown(store.generate(**ones(begin), **GREEDY)))
        right = fresh(model, inputs)[0].tolist()
        monkeypatch.setattr(model, "prepare_inputs_for_generation", whole)
        assert store.generate(**inputs, streamer=Streamer(), **GREEDY)[0].tolist() == right
        assert "computes other tokens than the rest of the prompt" in store.reuse[0].why
        assert told == [right[:-6], *([x] for x in right[-6:]), []]
        monkeypatch.setattr(model, "prepare_inputs_for_generation", whole)
        with pytest.MonkeyPatch.context() as sharded:
            sharded.setattr(generation, "waits_for_others", lambda model: True)  # they compute nothing again
            with pytest.raises(UnsupportedError, match="the weights are sharded"):
                store.generate(**ones(grown(torch.tensor([right]))), **GREEDY)


def check_that_a_call_within_is_refused(chat: Conversation) -> None:
    inputs = ones(some_ids(9))

    class Within(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            with pytest.raises(ConcurrentUseError, match="already") as refused:
                chat.generate(**inputs, **GREEDY)
            errors.append(refused.value)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    errors = list[ConcurrentUseError]()
    out = chat.generate(**inputs, stopping_criteria=StoppingCriteriaList([Within()]), **GREEDY)
    assert len(errors) == GREEDY["max_new_tokens"]
    assert out.tolist() == [chat.ids], "a call that was refused within it has changed nothing"
    assert chat.generate(**inputs, **GREEDY).tolist() == [chat.ids]


@pytest.mark.parametrize("deep", [0, 300])
def test_a_call_of_a_conversation_within_its_own_call_is_refused(deep: int) -> None:
    def below(left: int) -> None:
        below(left - 1) if left else check_that_a_call_within_is_refused(chat)

    with store_of(tiny_model("llama")) as store:
        chat = store.open("a")
        below(deep)


def test_an_interrupt_in_what_cleans_up_leaves_a_conversation_that_goes_on_and_a_store_that_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal may come before a line that says that a call has ended."""
    model, inputs = tiny_model("llama"), ones(some_ids(12))

    class Interrupted(dict[Any, Any]):
        def clear(self) -> None:
            raise KeyboardInterrupt

        def pop(self, *args: Any) -> Any:
            raise KeyboardInterrupt

    with store_of(model) as store:
        chat, under_way = store.open("a"), store._under_way
        active = under_way._calls
        inside = chat._inside
        for where, name in ((chat, "_inside"), (under_way, "_calls")):
            with monkeypatch.context() as patch:
                left = Interrupted()
                patch.setattr(where, name, left)
                with pytest.raises(KeyboardInterrupt):
                    chat.generate(**inputs, **GREEDY)
            (inside if where is chat else active).update(left)
            assert torch.equal(chat.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert active, "it is listed still"
        check_that_a_call_within_is_refused(chat)
        thread = threading.Thread(target=chat.generate, kwargs={**inputs, **GREEDY})
        thread.start()
        thread.join()
        assert chat.reuse is not None
        assert chat.reuse.cached == 11


def test_a_model_that_is_divided_over_processes_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generation, "mesh_of", lambda model: object())
    with TieredMemory(host_budget="1MiB") as memory:
        with pytest.raises(UnsupportedError, match="divided over processes") as held:
            store_of(tiny_model("llama"), memory=memory, host_budget=None, directory=tmp_path / "x")
        assert held.value is not None  # as a notebook holds it
        assert not memory.parked
    assert not (tmp_path / "x").exists()
