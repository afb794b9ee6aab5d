"""What a message names as the way out is one."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from families import build_model, prompt_ids, tiny_model
from placements import tiered_cache

import kvtier
from kvtier import BudgetError, ConfigError, MismatchError, Policy, TieredKVCache, TieredMemory
from kvtier.planning.policy import checked_victims

OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def test_a_shared_memory_that_is_too_small_says_who_else_is_there_and_what_helps() -> None:
    model = build_model("llama", "sdpa")
    memory = TieredMemory(host_budget=60_000)
    caches = [TieredKVCache(model.config, memory=memory, block_size=4) for _ in range(2)]
    prompt = prompt_ids(rows=1, length=60)
    with torch.no_grad():
        model(prompt, past_key_values=caches[0])
        with pytest.raises(BudgetError, match="Besides what another one may use") as refused:
            model(prompt, past_key_values=caches[1])
        asked = re.search(r"host_budget=(\d+) or more, as an option or by `memory\.resize`", str(refused.value))
        assert asked is not None
        assert int(asked[1]) == refused.value.needed
        memory.resize(host_budget=int(asked[1]) - 1)
        with pytest.raises(BudgetError):
            model(prompt, past_key_values=caches[1])
        memory.resize(host_budget=int(asked[1]))
        model(prompt, past_key_values=caches[1])


def test_who_claims_nothing_of_a_shared_memory_is_not_blamed() -> None:
    model = build_model("llama", "sdpa")
    memory = TieredMemory(host_budget=60_000)
    others = [TieredKVCache(model.config, memory=memory, block_size=4) for _ in range(2)]
    cache = TieredKVCache(model.config, memory=memory, block_size=4)
    with torch.no_grad():
        for other in others:
            model(prompt_ids(rows=1, length=4), past_key_values=other)
            other.reset()
        with pytest.raises(BudgetError) as refused:
            model(prompt_ids(rows=1, length=400), past_key_values=cache)
    assert "Besides" not in str(refused.value)
    assert "shares" not in str(refused.value)


def test_a_store_with_a_memory_of_its_own_is_told_of_its_options() -> None:
    with (
        kvtier.ConversationStore(build_model("llama", "sdpa"), host_budget=1000) as store,
        pytest.raises(BudgetError, match=r"host_budget=\d+ or more, as an option") as refused,
    ):
        store.generate(prompt_ids(rows=1, length=60), max_new_tokens=2, **OPTIONS)
    assert "Besides" not in str(refused.value)


def test_a_cache_that_is_alone_is_told_of_its_own_options() -> None:
    model = build_model("llama", "sdpa")
    cache = TieredKVCache(model.config, host_budget=1000, block_size=4)
    with pytest.raises(BudgetError, match=r"as an option or by `resize`") as refused, torch.no_grad():
        model(prompt_ids(rows=1, length=60), past_key_values=cache)
    cache.resize(host_budget=refused.value.needed)
    with torch.no_grad():
        model(prompt_ids(rows=1, length=60), past_key_values=cache)


def test_a_generate_that_was_cut_short_goes_on_by_what_the_refusal_says() -> None:
    model = build_model("llama", "sdpa")
    prompt = prompt_ids(rows=1, length=12)
    expected = model.generate(prompt, max_new_tokens=20, **OPTIONS)
    cache = tiered_cache(model)
    tokens = 0

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal tokens
        tokens += 1
        if tokens == 5:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, past_key_values=cache, max_new_tokens=20, logits_processor=[stop], **OPTIONS)
    with pytest.raises(MismatchError, match="cut short") as refused:
        model.generate(prompt, past_key_values=cache, max_new_tokens=20, **OPTIONS)
    said = re.search(r"cache\.crop\((-\d+)\)", str(refused.value))
    assert said is not None
    cache.crop(int(said[1]))
    assert cache.get_seq_length() == 11
    assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=20, **OPTIONS), expected)


def test_a_cache_that_was_passed_and_refused_is_not_called_unused() -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers += 1
    cache = TieredKVCache(config)
    with pytest.raises(MismatchError), torch.no_grad():
        tiny_model("llama")(prompt_ids(rows=1, length=5), past_key_values=cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.close()


@pytest.mark.parametrize("make", [TieredKVCache, lambda *args: TieredMemory(*args[1:])])
def test_an_option_without_its_name_is_told_the_names(make: Any) -> None:
    with pytest.raises(TypeError, match=r"give options by their names, .*device_budget, host_budget") as raised:
        make(tiny_model("llama").config, "4GiB")
    assert isinstance(raised.value, kvtier.KVTierError)


def test_a_policy_whose_constructor_calls_no_other_has_the_defaults() -> None:
    class Mine(Policy):
        def __init__(self) -> None:
            pass

    model = build_model("llama", "sdpa")
    cache = TieredKVCache(model.config, policy=Mine(), device_budget=30_000, block_size=4)
    prompt = prompt_ids(rows=1, length=60)
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=5, **OPTIONS)
    assert cache.stats.evictions
    assert torch.equal(out, model.generate(prompt, max_new_tokens=5, **OPTIONS))


def test_victims_that_are_none_are_told_briefly() -> None:
    with pytest.raises(ConfigError, match="a tuple of 2") as raised:
        list(checked_victims([("x" * 5000, 1)]))
    assert len(str(raised.value)) < 200


def test_a_cache_of_windows_only_does_not_say_that_blocks_are_on_the_host() -> None:
    model = tiny_model("mistral_sliding")
    cache = TieredKVCache(model.config)
    with torch.no_grad():
        model(prompt_ids(rows=1, length=10), past_key_values=cache)
    assert "no layer is tiered" in str(cache.explain())
    assert "all blocks begin" not in str(cache.explain())
