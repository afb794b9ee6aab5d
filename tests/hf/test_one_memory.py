"""Caches on one memory: what they need together, what they give back, and what is counted."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from families import prompt_ids, tiny_model
from placements import ON_HOST

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.testing import HeldTransfers


@torch.no_grad()
def test_a_cache_on_a_shared_memory_gives_back_what_copies_were_still_using() -> None:
    memory = TieredMemory(device_budget=60_000, host_budget=10**6)
    memory.set_up(lambda device: HeldTransfers(device, seed=1, eagerness=0.0))
    model = tiny_model("llama")
    with TieredKVCache(model.config, memory=memory, block_size=4) as other:
        model(input_ids=prompt_ids(rows=1, length=5), past_key_values=other)
        before = memory.stats
        cache = TieredKVCache(model.config, memory=memory, block_size=4)
        model(input_ids=prompt_ids(rows=1, length=60), past_key_values=cache)
        assert memory.stats.host.bytes > before.host.bytes
        cache.close()
        after = memory.stats
        assert (after.device.bytes, after.host.bytes) == (before.device.bytes, before.host.bytes)
    memory.close()


@pytest.mark.usefixtures("on_the_host")
@torch.no_grad()
def test_a_copy_that_was_refused_is_not_in_the_memory_while_its_error_is_kept() -> None:
    memory, model = TieredMemory(host_budget=10**6), tiny_model("llama")
    cache = TieredKVCache(model.config, memory=memory, block_size=4)
    model(input_ids=prompt_ids(rows=1, length=45), past_key_values=cache)
    memory.resize(host_budget=memory.stats.host.bytes + 8192)  # less than the copy takes
    with pytest.raises(BudgetError) as kept:
        copy.deepcopy(cache)
    cache.close()
    memory.close()  # it raises where anything uses it
    assert kept.value.needed


@pytest.mark.usefixtures("on_the_host")
@torch.no_grad()
def test_a_forward_that_was_refused_is_no_step_and_a_copy_is_no_fallback() -> None:
    model = tiny_model("llama")
    with TieredKVCache(model.config, host_budget=30_000, block_size=4) as cache:
        model(input_ids=prompt_ids(rows=1, length=5), past_key_values=cache)
        with pytest.raises(BudgetError):
            model(input_ids=prompt_ids(rows=1, length=500), past_key_values=cache)
        assert cache.stats.steps == 1
        copy.deepcopy(cache).close()
        assert cache.stats.dense_fallbacks == cache.stats.dense_reads == 0


@pytest.mark.usefixtures("on_the_host")
def test_a_forward_whose_later_layer_was_refused_is_no_step() -> None:
    """In its second layer rows share less than in the first, which the step was admitted with."""
    equal, apart = torch.zeros(4, 1, 40, 4), torch.randn(4, 1, 40, 4)
    for forwards in (0, 1):
        with TieredKVCache(host_budget=6_000, block_size=4) as cache:
            for _ in range(forwards):
                for layer in range(2):
                    cache.update(equal[:, :, :4], equal[:, :, :4], layer)
            cache.update(equal, equal, 0)
            with pytest.raises(BudgetError):
                cache.update(apart, apart, 1)
            assert cache.stats.steps == forwards
            assert cache.get_seq_length() == 4 * forwards


@pytest.mark.skipif(not ON_HOST, reason="budgets are emulated")
@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_the_device_budget_that_is_named_on_a_shared_memory_works_from_the_start(seed: int) -> None:
    """What other caches read through grows with a budget too."""
    rng = random.Random(seed)
    forwards = [[rng.randint(1, 90) for _ in range(2)], [rng.randint(1, 60) for _ in range(rng.choice((1, 2)))]]
    sizes, model = (rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 16))), tiny_model("llama")

    def refused(budget: int) -> tuple[int, BudgetError | None]:
        memory, done = TieredMemory(device_budget=budget, host_budget=10**7), 0
        with contextlib.ExitStack() as stack:
            for size, lengths in zip(sizes, forwards, strict=True):
                cache = stack.enter_context(TieredKVCache(model.config, memory=memory, block_size=size))
                cache._was_used = True
                for length in lengths:
                    try:
                        model(input_ids=prompt_ids(rows=1, length=length), past_key_values=cache)
                    except BudgetError as error:
                        return done, error
                    done += 1
        return done, None

    budget, last = 1, -1
    while True:
        done, error = refused(budget)
        if error is None:
            break
        assert done > last, "the budget that was named is refused at the same step"
        budget, last = error.needed, done
