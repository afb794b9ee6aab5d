"""What `crop` and the row operations are given is checked before anything changes, in every kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import dynamic_cache, prompt_ids, tiny_model
from placements import alike, outcome
from transformers import Cache, DynamicCache

from kvtier import ConfigError, KVTierError, MismatchError, TieredKVCache, UnsupportedError

ROWS = 3
#: Only full attention, full attention among windows, and with recurrent layers.
NAMES = ("llama", "gemma3", "qwen3_next")


@torch.no_grad()
def used(name: str, cache: Cache) -> Cache:
    model = tiny_model(name)
    for length, seed in ((11, 1), (1, 2)):
        model(input_ids=prompt_ids(rows=ROWS, length=length, seed=seed), past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(name: str, cache: Cache, rows: int = ROWS) -> torch.Tensor:
    return tiny_model(name)(input_ids=prompt_ids(rows=rows, length=2, seed=3), past_key_values=cache).logits


Call = Callable[[Any], Any]
MALFORMED: dict[str, Call] = {
    "crop_fraction": lambda cache: cache.crop(-2.5),
    "crop_whole_float": lambda cache: cache.crop(-2.0),
    "crop_text": lambda cache: cache.crop("x"),
    "crop_digits": lambda cache: cache.crop("-2"),
    "crop_none": lambda cache: cache.crop(None),
    "crop_bool": lambda cache: cache.crop(True),
    "crop_tensor_of_floats": lambda cache: cache.crop(torch.tensor(-2.5)),
    "crop_tensor_of_two": lambda cache: cache.crop(torch.tensor([-1, -2])),
    "repeat_negative": lambda cache: cache.batch_repeat_interleave(-1),
    "repeat_zero": lambda cache: cache.batch_repeat_interleave(0),
    "repeat_fraction": lambda cache: cache.batch_repeat_interleave(1.5),
    "repeat_text": lambda cache: cache.batch_repeat_interleave("2"),
    "repeat_of_each": lambda cache: cache.batch_repeat_interleave(torch.tensor([1, 2, 3])),
    "reorder_floats": lambda cache: cache.reorder_cache(torch.tensor([0.0, 1.0, 2.0])),
    "reorder_bools": lambda cache: cache.reorder_cache(torch.tensor([True, False, True])),
    "reorder_text": lambda cache: cache.reorder_cache("012"),
    "reorder_none": lambda cache: cache.reorder_cache(None),
    "select_floats": lambda cache: cache.batch_select_indices(torch.tensor([0.0])),
    "select_text": lambda cache: cache.batch_select_indices(["a"]),
}
MISFITS: dict[str, Call] = {
    "reorder_beyond": lambda cache: cache.reorder_cache(torch.tensor([0, 1, ROWS])),
    "reorder_before": lambda cache: cache.reorder_cache(torch.tensor([0, 1, -ROWS - 1])),
    "reorder_matrix": lambda cache: cache.reorder_cache(torch.tensor([[0, 1, 2]])),
    "reorder_scalar": lambda cache: cache.reorder_cache(torch.tensor(0)),
    "select_beyond": lambda cache: cache.batch_select_indices(torch.tensor([ROWS])),
    "select_matrix": lambda cache: cache.batch_select_indices(torch.tensor([[0]])),
    "select_short_mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
    "select_list_beyond": lambda cache: cache.batch_select_indices([0, ROWS]),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(name: str) -> None:
    expected = next_logits(name, used(name, dynamic_cache(tiny_model(name))))
    cache = used(name, TieredKVCache(tiny_model(name).config, block_size=4, host_attention=False))
    before = cache.stats
    for calls, error in ((MALFORMED, ConfigError), (MISFITS, MismatchError)):
        for what, call in calls.items():
            refusal = outcome(lambda call=call: call(cache))
            assert type(refusal) is error, (what, repr(refusal))
    assert cache.stats == before
    assert alike(expected, next_logits(name, cache))
    cache.check_integrity()


@pytest.mark.parametrize("what", [*MALFORMED, *MISFITS])
def test_a_layer_by_itself_refuses_the_same(what: str) -> None:
    cache = used("llama", TieredKVCache(tiny_model("llama").config, block_size=4))
    refusal = outcome(lambda: (MALFORMED | MISFITS)[what](cache.layers[0]))
    assert isinstance(refusal, KVTierError), repr(refusal)
    assert cache.layers[0].get_seq_length() == 12
    cache.check_integrity()


MEANT: dict[str, tuple[Call, Call]] = {
    # as numpy and Transformers 5.17 count, and what `DynamicCache` takes for the same
    "crop_numpy": (lambda cache: cache.crop(np.int64(-2)), lambda cache: cache.crop(-2)),
    "crop_tensor": (lambda cache: cache.crop(torch.tensor(-2)), lambda cache: cache.crop(-2)),
    "crop_nothing": (lambda cache: cache.crop(torch.tensor(0)), lambda cache: None),
    "repeat_numpy": (
        lambda cache: cache.batch_repeat_interleave(np.int32(2)),
        lambda cache: cache.batch_repeat_interleave(2),
    ),
    "repeat_tensor": (
        lambda cache: cache.batch_repeat_interleave(torch.tensor(2)),
        lambda cache: cache.batch_repeat_interleave(2),
    ),
    "reorder_int32": (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0], dtype=torch.int32)),
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    ),
    "reorder_list": (
        lambda cache: cache.reorder_cache([2, 0, 0]),
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    ),
    "select_list": (
        lambda cache: cache.batch_select_indices([1]),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ),
    "select_from_the_end": (
        lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    ),
    "select_mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 2])),
    ),
}


@pytest.mark.parametrize(
    ("what", "name"),  # a window that has moved on cannot go back
    [(what, name) for what in MEANT for name in ("llama", "gemma3") if name == "llama" or not what.startswith("crop")],
)
def test_what_can_be_meant_is_what_dynamic_cache_does(what: str, name: str) -> None:
    ours, theirs = MEANT[what]
    cache = used(name, TieredKVCache(tiny_model(name).config, block_size=4, host_attention=False))
    expected = used(name, DynamicCache(config=tiny_model(name).config))
    ours(cache)
    theirs(expected)
    rows = cache.layers[-1].keys.shape[0]
    assert alike(next_logits(name, expected, rows), next_logits(name, cache, rows))
    cache.check_integrity()


def test_before_the_first_forward_only_what_is_malformed_is_refused() -> None:
    cache = TieredKVCache(tiny_model("llama").config)
    for call in MALFORMED.values():
        with pytest.raises(ConfigError):
            call(cache)
    cache.reorder_cache(torch.tensor([5]))
    cache.batch_select_indices(torch.tensor([5]))
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("shape", [(1, 2, 3, 0), (1, 0, 3, 4)])
def test_keys_without_heads_or_width_are_refused_and_change_nothing(shape: tuple[int, ...]) -> None:
    cache = TieredKVCache(block_size=4)
    empty, some = torch.zeros(shape), torch.ones(1, 2, 3, 4)
    for pair in ((empty, some), (some, empty), (empty, empty)):
        with pytest.raises(MismatchError, match="no heads or no width"):
            cache.update(*pair, 0)
        cache.check_integrity()
    cache.update(some, some, 0)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("recorded", [False, True], ids=["as-made", "past-recorded"])
@pytest.mark.parametrize("removed", [3, -1, -100])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "jamba"])
def test_a_crop_goes_back_exactly_or_is_refused_before_anything_changes(
    name: str, removed: int, recorded: bool
) -> None:
    """`DynamicCache` crops convolutions, and leaves recurrent states as they were; a window that has recorded fewer
    tokens than are removed goes below zero."""
    ids = prompt_ids(rows=ROWS, length=12, seed=1)
    model, caches = tiny_model(name), [TieredKVCache(tiny_model(name).config, block_size=4) for _ in range(2)]
    for cache in caches:
        if recorded:
            cache.activate_past_recording()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
    refusal = outcome(lambda: caches[0].crop(removed))
    with torch.no_grad():
        if refusal is None:
            left = max(0, 12 + removed if removed < 0 else min(removed, 12))
            assert caches[0].get_seq_length() == left
            expected = model(input_ids=torch.cat([ids[:, :left], prompt_ids(rows=ROWS, length=2, seed=3)], 1)).logits
            assert torch.allclose(next_logits(name, caches[0]), expected[:, -2:], rtol=1e-4, atol=1e-3)
        else:
            assert isinstance(refusal, ConfigError | UnsupportedError), repr(refusal)
            assert "cropped" in str(refusal) or removed > 0
            for cache in caches:
                cache.crop(0)  # as whoever records the past does behind each forward
            assert alike(next_logits(name, caches[1]), next_logits(name, caches[0]))
    caches[0].check_integrity()
    assert (refusal is None) >= (name == "llama" and removed < 0)
    assert (refusal is None) >= (name == "gemma3" and recorded and removed == -1)


@pytest.mark.parametrize("what", [None, [1.0], 3], ids=["none", "list", "number"])
def test_keys_that_are_no_tensors_are_refused_and_change_nothing(what: Any) -> None:
    cache, x = used("llama", TieredKVCache(tiny_model("llama").config, block_size=4)), torch.zeros(ROWS, 2, 1, 12)
    for call in (
        lambda: cache.update(what, x, 0),
        lambda: cache.update(x, what, 0),
        lambda: setattr(cache.layers[0], "keys", what),
    ):
        with pytest.raises(MismatchError, match="tensors"):
            call()
    expected = next_logits("llama", used("llama", TieredKVCache(tiny_model("llama").config, block_size=4)))
    assert alike(expected, next_logits("llama", cache))


def test_the_class_in_place_of_a_cache_is_refused_and_later_prompts_are_still_checked() -> None:
    model, prompt = tiny_model("llama"), prompt_ids(rows=1, length=9)
    with pytest.raises(ConfigError, match=r"the class TieredKVCache.*TieredKVCache\(model.config\)"):
        model.generate(prompt, past_key_values=TieredKVCache, max_new_tokens=2)
    cache = TieredKVCache(model.config)
    model.generate(prompt, past_key_values=cache, max_new_tokens=2, do_sample=False)
    with pytest.raises(MismatchError, match="nothing is left to compute"):
        model.generate(prompt, past_key_values=cache, max_new_tokens=2, do_sample=False)


def test_assisted_decoding_that_would_add_a_held_prompt_again_is_refused_and_new_tokens_alone_are_not() -> None:
    model, prompt = tiny_model("llama"), prompt_ids(rows=1, length=20)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    cache = TieredKVCache(model.config, block_size=4)
    longer = torch.cat(
        [model.generate(prompt, past_key_values=cache, **options), prompt_ids(rows=1, length=5, seed=3)], 1
    )
    expected, held = model.generate(longer, **options), cache.get_seq_length()
    for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}, {"assistant_early_exit": 1}):
        with pytest.raises(MismatchError, match="Assisted decoding computes every token") as refused:
            model.generate(longer, past_key_values=cache, **way, **options)
        assert cache.get_seq_length() == held
    new = {"input_ids": longer[:, held:], "attention_mask": torch.ones_like(longer)}
    for _ in range(2):
        out = outcome(lambda: model.generate(**new, past_key_values=cache, prompt_lookup_num_tokens=3, **options))
        if isinstance(out, Exception):  # a mask with padding, or any (Transformers 5.17), is cut to the new tokens
            assert isinstance(out, MismatchError), repr(out)
            assert "Leave assisted decoding away" in str(out)
        else:
            assert f"input_ids[:, {held}:]" in str(refused.value)
            assert torch.equal(out[:, new["input_ids"].shape[1] :], expected[:, longer.shape[1] :])
        cache.crop(held - cache.get_seq_length())
        new["attention_mask"][0, 0] = 0
    assert isinstance(out, MismatchError)


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_embeddings_of_fewer_tokens_than_a_prompt_has_beyond_a_cache_are_refused(more: int) -> None:
    model, options = tiny_model("llama"), {"max_new_tokens": 6, "do_sample": False}
    cache, ids = TieredKVCache(model.config, block_size=4), prompt_ids(rows=1, length=25)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    embeds, mask = model.get_input_embeddings()(ids[:, : 20 + more]), torch.ones_like(ids[:, : 20 + more])
    if more > 0:
        with pytest.raises(MismatchError, match="Give those of all tokens"):
            model.generate(inputs_embeds=embeds[:, 20:], attention_mask=mask, past_key_values=cache, **options)
        expected = model.generate(inputs_embeds=embeds, **options)
        assert torch.equal(model.generate(inputs_embeds=embeds, past_key_values=cache, **options), expected)
    else:
        with pytest.raises(MismatchError, match="nothing is left to compute"):
            model.generate(inputs_embeds=embeds, past_key_values=cache, **options)
        assert cache.get_seq_length() == 20
