"""Whether a cache is used, and rightly: one that no forward used says so, and histories that do not fit are noticed."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build_model, dynamic_cache, prompt_ids, tiny_model
from placements import ON_HOST
from transformers import BatchEncoding

import kvtier
from kvtier import BudgetError, ConfigError, MismatchError, TieredKVCache
from kvtier.cpu import loader
from kvtier.hf.models.names import CACHE


def greedy(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
    return model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False, **options)


# -------------------------------------------------------------------------------------- unused


def leave(cache: TieredKVCache) -> None:
    with cache:
        pass


@pytest.mark.parametrize("end", [TieredKVCache.close, leave])
def test_a_cache_that_is_closed_unused_says_so_once(end: Callable[[TieredKVCache], None]) -> None:
    cache = TieredKVCache(tiny_model("llama").config)
    with pytest.warns(RuntimeWarning, match="was closed, and no forward had used it") as told:
        end(cache)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.close()
        del cache
        gc.collect()


def test_a_cache_that_is_dropped_unused_says_so() -> None:
    cache = TieredKVCache(tiny_model("llama").config)
    held = [cache]
    del cache
    with pytest.warns(RuntimeWarning, match="dropped"):
        held.clear()


def used(cache: TieredKVCache) -> None:
    greedy(tiny_model("llama"), prompt_ids(), cache)


def used_and_reset(cache: TieredKVCache) -> None:
    used(cache)
    cache.reset()


def restored(cache: TieredKVCache) -> None:
    copy.deepcopy(cache)
    used(cache)
    copy.deepcopy(cache)


def assigned(cache: TieredKVCache) -> None:
    cache.layers[0].keys = cache.layers[0].values = torch.zeros(1, 2, 3, 12)


def refused(cache: TieredKVCache) -> None:
    cache.resize(**{"host_budget" if ON_HOST else "device_budget": 1})
    with pytest.raises(BudgetError):
        used(cache)


@pytest.mark.parametrize("use", [used, used_and_reset, restored, assigned, refused])
def test_a_cache_that_was_used_says_nothing(use: Callable[[TieredKVCache], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with TieredKVCache(tiny_model("llama").config) as cache:
            use(cache)
        dropped = TieredKVCache(tiny_model("llama").config)
        use(dropped)
        del dropped
        gc.collect()


def test_an_error_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), TieredKVCache(tiny_model("llama").config):
            raise KeyError
        with pytest.raises(ConfigError):
            TieredKVCache(tiny_model("llama").config, block_size=0)
        gc.collect()


def test_a_model_that_puts_another_cache_in_its_place_is_left_by_the_wrapper() -> None:
    model = build_model("llama", "sdpa")
    prepare = model.prepare_inputs_for_generation

    def another(*args: Any, **kwargs: Any) -> Any:
        kwargs[CACHE] = None
        return prepare(*args, **kwargs)

    model.prepare_inputs_for_generation = another
    with pytest.warns(RuntimeWarning, match="another cache"), kvtier.tiered(model) as tiered:
        model.generate(prompt_ids(), max_new_tokens=2)
    assert tiered.calls == 0


# --------------------------------------------------------------------------------- covered prompts


@pytest.mark.parametrize("where", ["call", "checkpoint"])
def test_a_call_that_is_told_to_use_no_cache_is_refused_where_it_is_given_one(where: str) -> None:
    """Transformers gives the model the cache all the same, and the whole prompt again for each token."""
    model, ids = build_model("llama", "sdpa"), prompt_ids(rows=2, length=20)
    if where == "checkpoint":
        model.generation_config.use_cache = False  # as `from_pretrained` makes it of a config that says so
    with TieredKVCache(model.config) as cache:
        with pytest.raises(ConfigError, match="use_cache=True"):
            greedy(model, ids, cache, **({"use_cache": False} if where == "call" else {}))
        assert cache.get_seq_length() == 0
        assert torch.equal(greedy(model, ids, cache, use_cache=True), greedy(model, ids, None, use_cache=True))


@pytest.mark.parametrize("shorter", [0, 1, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_that_the_cache_covers_whole_is_refused(shorter: int, masked: bool) -> None:
    model = tiny_model("llama")
    ids = prompt_ids(rows=2, length=20)
    with TieredKVCache(model.config, block_size=4) as cache:
        out = greedy(model, ids, cache)
        held = cache.get_seq_length()
        prompt = out[:, : held - shorter]
        mask = torch.ones_like(prompt)
        if masked:
            mask[0, :3] = 0
        with pytest.raises(MismatchError, match=f"holds {held} tokens and the prompt has {held - shorter}"):
            greedy(model, prompt, cache, attention_mask=mask)
        assert cache.get_seq_length() == held
        longer = out[:, : held + 1]
        assert torch.equal(greedy(model, longer, cache), greedy(model, longer, None))


def test_new_tokens_alone_under_a_mask_of_all_are_no_covered_prompt() -> None:
    model = tiny_model("llama")
    ids, more = prompt_ids(rows=1, length=20), prompt_ids(rows=1, length=3, seed=7)
    found = []
    for cache in (TieredKVCache(model.config), dynamic_cache(model)):
        model(ids, past_key_values=cache)
        found.append(greedy(model, more, cache, attention_mask=torch.ones(1, 23, dtype=torch.long)))
    assert torch.equal(*found)


# ------------------------------------------------------------------------------------- keep_prefix


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("change", [0, 1, 7, 19, 25, None])
def test_what_is_kept_of_a_history_gives_the_tokens_of_an_empty_cache(name: str, change: int | None) -> None:
    model = tiny_model(name)
    ids = prompt_ids(rows=2, length=20)
    with TieredKVCache(model.config, block_size=4) as cache:
        held_ids = greedy(model, ids, cache)
        new_ids = torch.cat([held_ids, prompt_ids(rows=2, length=4, seed=3)], 1)
        if change is not None:
            new_ids[1, change] = new_ids[1, change] % 100 + 1
        expected = greedy(model, new_ids, dynamic_cache(model))
        kept = cache.keep_prefix(new_ids, held_ids)
        assert kept == cache.get_seq_length()
        if name == "llama":
            assert kept == (25 if change is None else change)
        elif change is None:
            assert kept == 25
        else:
            assert kept in (0, 25)
        assert torch.equal(greedy(model, new_ids, cache), expected)


def test_without_the_native_kernel_a_prompt_over_a_past_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_load", lambda: None)  # as where there was no compiler
    model = tiny_model("llama")
    with TieredKVCache(model.config, block_size=4) as cache:
        held = greedy(model, prompt_ids(rows=2, length=20), cache)
        longer = torch.cat([held, prompt_ids(rows=2, length=40, seed=3)], 1)
        assert torch.equal(greedy(model, longer, cache), greedy(model, longer, dynamic_cache(model)))


def test_the_last_token_of_a_prompt_that_is_held_whole_is_computed() -> None:
    model = tiny_model("llama")
    ids = prompt_ids(rows=1, length=20)
    with TieredKVCache(model.config) as cache:
        held_ids = greedy(model, ids, cache)
        assert cache.keep_prefix(ids, held_ids) == 19
        assert torch.equal(greedy(model, ids, cache), held_ids)
        assert cache.keep_prefix(ids[0].tolist(), held_ids[0].tolist()) == 19
        assert cache.keep_prefix(ids[:, :1], held_ids) == 0
        assert cache.get_seq_length() == 0
        assert cache.keep_prefix(ids, []) == 0, "an empty cache"


@pytest.mark.parametrize("copied", [False, True])
def test_of_beams_no_more_is_kept_than_their_prompt(copied: bool) -> None:
    model = tiny_model("llama")
    for seed in range(3):
        with TieredKVCache(model.config, block_size=4) as held:
            beams = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9, "do_sample": False}
            found = model.generate(prompt_ids(rows=1, length=20, seed=seed), past_key_values=held, **beams)
            cache = copy.deepcopy(held) if copied else held
            longer = torch.cat([found, prompt_ids(rows=3, length=4, seed=9)], 1)
            assert cache.keep_prefix(longer, found) == 20
            answers = greedy(model, longer, cache)
            assert torch.equal(answers, greedy(model, longer, dynamic_cache(model)))
            assert cache.keep_prefix(torch.cat([answers, answers], 1), answers) == 38, "these rows are what it returned"


def test_ids_that_are_not_of_this_cache_are_refused_and_nothing_changes() -> None:
    model = tiny_model("llama")
    ids = prompt_ids(rows=2, length=20)
    with TieredKVCache(model.config) as cache:
        out = greedy(model, ids, cache)
        for new, held, error in (
            (out, ids, MismatchError),
            (out[:1], out, MismatchError),
            (out, out[:1], MismatchError),
            (out.float(), out, ConfigError),
            (out[:, :0], out, ConfigError),
            ("hello", out, ConfigError),
            (out[None], out, ConfigError),
        ):
            with pytest.raises(error):
                cache.keep_prefix(new, held)
        for inputs in (BatchEncoding({"input_ids": out}), {"input_ids": out}):
            with pytest.raises(ConfigError, match=r"new_ids are not token ids.*Give its `.input_ids`"):
                cache.keep_prefix(inputs, out)
        assert cache.get_seq_length() == 25


def test_what_was_computed_behind_an_answer_for_other_processes_is_cropped_as_the_error_says() -> None:
    """With `synced_gpus` a process that has ended computes its last token again, until others end."""
    model = tiny_model("llama")
    with TieredKVCache(model.config) as cache, torch.no_grad():
        out = greedy(model, prompt_ids(rows=2, length=20), cache)
        for _ in range(3):
            model(out[:, -1:], past_key_values=cache)
        longer = torch.cat([out, prompt_ids(rows=2, length=4, seed=3)], 1)
        with pytest.raises(MismatchError, match=r"`synced_gpus`\), `cache.crop\(-3\)` first"):
            cache.keep_prefix(longer, out)
        cache.crop(-3)
        assert cache.keep_prefix(longer, out) == out.shape[1] - 1
        assert torch.equal(greedy(model, longer, cache), greedy(model, longer, None))
