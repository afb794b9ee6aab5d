"""What can be done to a cache between forwards: crop, reorder, repeat, select, reset, copy. As on ``DynamicCache``.

A scenario is a function ``(model, cache) -> result`` that runs forwards and operations and returns every logit.
"""

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from families import build_model, dynamic_cache, prompt_ids, tiny_model
from placements import Placement, assert_same_as_dynamic_cache, close, tiered_cache
from transformers import Cache, PreTrainedModel

from kvtier import TieredKVCache, TieredMemory, UnsupportedError
from kvtier.cpu import native

Scenario = Callable[[PreTrainedModel, Cache], Any]

SCENARIOS: dict[str, Scenario] = {}
#: Block sizes are crossed with one family; eager attention differs only in that it makes tensors of the views.
CASES: tuple[tuple[str, str, int, Placement], ...] = (
    ("llama", "sdpa", 4, "host"),
    ("llama", "sdpa", 4, "smallest"),
    ("llama", "sdpa", 4, "between"),
    ("llama", "sdpa", 1, "smallest"),
    ("llama", "eager", 4, "smallest"),
    ("gemma3", "sdpa", 4, "host"),
    ("gemma3", "sdpa", 4, "smallest"),
    ("gemma3", "sdpa", 4, "between"),
    ("deepseek_v3", "sdpa", 4, "host"),
    ("deepseek_v3", "sdpa", 4, "smallest"),
)


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


@torch.no_grad()
def feed(model: PreTrainedModel, cache: Cache, *, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """One forward of `length` new random tokens for each of `rows`; its logits ``[rows, length, vocab]``."""
    return model(input_ids=prompt_ids(rows=rows, length=length, seed=seed), past_key_values=cache).logits


def decode(model: PreTrainedModel, cache: Cache, *, rows: int, steps: int = 4) -> list[torch.Tensor]:
    return [feed(model, cache, rows=rows, length=1, seed=100 + step) for step in range(steps)]


@scenario
def plain_loop(model: PreTrainedModel, cache: Cache) -> Any:
    return feed(model, cache, rows=2, length=13), decode(model, cache, rows=2)


@scenario
def loop_with_gradients_enabled(model: PreTrainedModel, cache: Cache) -> Any:
    logits = []
    for length, seed in ((13, 1), (1, 2), (1, 3), (4, 4)):
        output = model(input_ids=prompt_ids(rows=2, length=length, seed=seed), past_key_values=cache)
        logits.append(output.logits.detach())
    return logits


@scenario
def loop_in_inference_mode(model: PreTrainedModel, cache: Cache) -> Any:
    with torch.inference_mode():
        return plain_loop(model, cache)


@scenario
def loop_into_and_out_of_inference_mode(model: PreTrainedModel, cache: Cache) -> Any:
    logits = []
    for step, length in enumerate((13, 1, 1, 1, 4, 1, 1)):
        with torch.inference_mode(step % 4 < 2):
            logits.append(feed(model, cache, rows=2, length=length, seed=step))
    return [x.clone() for x in logits]


@scenario
def several_tokens_on_a_warm_cache(model: PreTrainedModel, cache: Cache) -> Any:
    return [feed(model, cache, rows=2, length=length, seed=length) for length in (13, 5, 1, 3, 8, 1)]


@scenario
def lengths_are_told(model: PreTrainedModel, cache: Cache) -> Any:
    told = []
    for length in (13, 1, 1):
        told.append([cache.get_mask_sizes(length, layer) for layer in range(model.config.num_hidden_layers)])
        feed(model, cache, rows=2, length=length)
        told.append([cache.get_seq_length(layer) for layer in range(model.config.num_hidden_layers)])
    return told


@scenario
def layers_stay_readable(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    decode(model, cache, rows=2)
    return [(layer.keys + 0, layer.values + 0, layer.keys.shape) for layer in cache.layers]


@scenario
def crop_with_the_past_recorded(model: PreTrainedModel, cache: Cache) -> Any:
    cache.activate_past_recording()
    logits = [feed(model, cache, rows=2, length=13)]
    for removed in (-3, 0, -1, -2):
        logits += [feed(model, cache, rows=2, length=4, seed=10 - removed)]
        cache.crop(removed)
    return logits, cache.get_seq_length(), decode(model, cache, rows=2)


@scenario
def crop_without_recording(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    cache.crop(-5)
    return cache.get_seq_length(), decode(model, cache, rows=2)


@scenario
def crop_to_a_length(model: PreTrainedModel, cache: Cache) -> Any:
    """Absolute on 5.17, refused on 5.24."""
    feed(model, cache, rows=2, length=13)
    cache.crop(6)
    return cache.get_seq_length(), decode(model, cache, rows=2)


@scenario
def crop_everything(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=5)
    cache.crop(-5)
    return cache.get_seq_length(), feed(model, cache, rows=2, length=7, seed=2)


@scenario
def crop_more_than_there_is(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=5)
    cache.crop(-9)
    return cache.get_seq_length()


@scenario
def reorder(model: PreTrainedModel, cache: Cache) -> Any:
    logits = [feed(model, cache, rows=3, length=13)]
    for order in ([2, 0, 1], [1, 1, 0], [2, 2, 2]):
        cache.reorder_cache(torch.tensor(order))
        logits += decode(model, cache, rows=3, steps=2)
    return logits


@scenario
def repeat_interleave(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    cache.batch_repeat_interleave(3)
    return decode(model, cache, rows=6)


@scenario
def select_indices(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=4, length=13)
    cache.batch_select_indices(torch.tensor([3, 1]))
    return decode(model, cache, rows=2)


@scenario
def select_by_mask(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=3, length=13)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    return decode(model, cache, rows=2)


@scenario
def repeat_then_select(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    cache.batch_repeat_interleave(2)
    logits = decode(model, cache, rows=4, steps=3)
    cache.batch_select_indices(torch.tensor([0, 3, 3]))
    return logits, decode(model, cache, rows=3)


@scenario
def operations_on_an_empty_cache(model: PreTrainedModel, cache: Cache) -> Any:
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    # Not `crop(0)`: DynamicCache's sliding layers look at keys that they do not have; see `test_failures`.
    cache.reset()
    return cache.get_seq_length(), feed(model, cache, rows=2, length=5)


@scenario
def deep_copy_continues(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    twin = copy.deepcopy(cache)
    decode(model, cache, rows=2, steps=2)
    return decode(model, twin, rows=2), decode(model, cache, rows=2), decode(model, twin, rows=2)


@scenario
def pickled_copy_continues(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=2, length=13)
    twin = pickle.loads(pickle.dumps(cache))
    decode(model, cache, rows=2, steps=2)
    return decode(model, twin, rows=2), decode(model, cache, rows=2), decode(model, twin, rows=2)


@pytest.mark.parametrize(("family", "attention", "block_size", "placement"), CASES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_does_what_it_does_to_dynamic_cache(
    name: str, family: str, attention: str, block_size: int, placement: Placement
) -> None:
    model = tiny_model(family, attention)
    assert_same_as_dynamic_cache(model, SCENARIOS[name], placement, block_size=block_size)


def again_after_a_reset(model: PreTrainedModel, cache: Cache) -> Any:
    feed(model, cache, rows=3, length=9, seed=9)
    cache.reset()
    assert cache.get_seq_length() == 0
    return plain_loop(model, cache)


@pytest.mark.parametrize("placement", ["host", "smallest", "between"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_reset_then_again_gives_the_same_as_a_new_cache(family: str, placement: Placement) -> None:
    """Against a new ``DynamicCache``: its own reset is broken in 5.17."""
    model = tiny_model(family)
    expected = plain_loop(model, dynamic_cache(model))
    assert_same_as_dynamic_cache(model, again_after_a_reset, placement, block_size=4, expected=expected)


def test_reset_gives_every_block_back() -> None:
    model = tiny_model("llama")
    cache = tiered_cache(model, 1 << 20, block_size=4)
    plain_loop(model, cache)
    assert cache.stats.device.used_blocks > 0
    cache.reset()
    assert cache.stats.device.used_blocks == cache.stats.host.used_blocks == 0
    cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_that_another_process_is_given_has_memory_of_its_own(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch shares memory that a pickle made, and nobody holds it until a process that is spawned asks for it."""
    model = tiny_model(family)
    cache = tiered_cache(model, block_size=4)
    feed(model, cache, rows=2, length=13)
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.UntypedStorage, lambda storage: pytest.fail("is shared"))
    twin = pickle.loads(ForkingPickler.dumps(cache))
    assert close(decode(model, twin, rows=2), decode(model, cache, rows=2))


@pytest.mark.parametrize("library", [True, False], ids=["native", "torch"])
def test_a_cache_whose_last_row_was_dropped_is_copied(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(native, "available", lambda: False)
    model = tiny_model("llama")
    cache = tiered_cache(model, block_size=4)
    with torch.no_grad():
        model(input_ids=prompt_ids(length=9), past_key_values=cache)
    cache.batch_select_indices(torch.zeros(0, dtype=torch.long))
    clone = copy.deepcopy(cache)
    clone.check_integrity()
    assert clone.layers[0].keys.shape == cache.layers[0].keys.shape == (0, 2, 9, 12)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("shared", [False, True], ids=["its-own-memory", "a-shared-memory"])
def test_a_shallow_copy_goes_on_without_the_cache_that_it_was_made_of(family: str, shared: bool) -> None:
    """Layers of Transformers' own would otherwise be those of both caches, and tiered ones not."""
    model = tiny_model(family)
    memory = TieredMemory(host_budget=10**7) if shared else None
    cache, alone = (TieredKVCache(model.config, block_size=4, memory=memory) for _ in range(2))
    for each in (cache, alone):
        feed(model, each, rows=2, length=13)
    twin = copy.copy(cache)
    assert (twin._forward.memory is memory) == shared
    feed(model, twin, rows=2, length=5, seed=7)
    expected = feed(model, alone, rows=2, length=5)
    for each in (cache, twin):
        each.check_integrity()
    assert torch.equal(feed(model, cache, rows=2, length=5), expected)


@pytest.mark.parametrize("block_size", [4, 64])
def test_a_backward_pass_through_the_cache_is_refused(block_size: int) -> None:
    """What is stored has no graph, and a gradient without it would be silently wrong."""
    model = build_model("llama", "sdpa")
    cache = tiered_cache(model, block_size=block_size)
    model(input_ids=prompt_ids(length=9), past_key_values=cache)
    logits = model(input_ids=prompt_ids(length=1, seed=2), past_key_values=cache).logits
    with pytest.raises(UnsupportedError):
        logits.sum().backward()


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_backward_pass_through_a_copy_is_refused_however_the_copy_was_made(way: Callable[[Any], Any]) -> None:
    x = torch.randn(1, 1, 5, 4, requires_grad=True)
    cache = TieredKVCache(block_size=4)
    cache.update(2 * x, 3 * x, 0)
    with torch.no_grad():
        made = way(cache)
    query = torch.randn(1, 1, 1, 4, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, made.layers[0].keys, made.layers[0].values)
    with pytest.raises(UnsupportedError, match="backward"):
        out.sum().backward()
