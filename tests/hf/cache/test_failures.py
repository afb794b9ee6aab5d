"""Misuse and interruptions: a clear error, nothing lost, and a way back."""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from families import build_model, dynamic_cache, prompt_ids, tiny_model
from placements import ON_HOST, ROOMY, alike, outcome, smallest_budget, tiered_cache
from test_interrupted_hybrids import PulledThePlug, at_module, forward, forwards, in_a_thread, model_of, same
from torch import nn
from transformers import Cache, PreTrainedModel

from kvtier import (
    BudgetError,
    ClosedError,
    ConcurrentUseError,
    InterruptedStepError,
    KVTierError,
    MismatchError,
    TieredKVCache,
)
from kvtier.attention import dispatch
from kvtier.forward import forward as forward_module
from kvtier.forward import steps
from kvtier.hf.models import layers

BLOCK_SIZE = 4
PROMPT = prompt_ids(rows=2, length=21)
ONE = PROMPT[:, :1]
NEW_TOKENS = 10


def generate(model: PreTrainedModel, cache: Cache, ids: torch.Tensor = PROMPT) -> torch.Tensor:
    """Greedy tokens up to ``PROMPT.shape[1] + NEW_TOKENS`` in all, whatever part of them `ids` holds already."""
    total = PROMPT.shape[1] + NEW_TOKENS
    return model.generate(ids, past_key_values=cache, max_new_tokens=total - ids.shape[1], do_sample=False)


@pytest.fixture(params=["host", "device", "smallest"])
def cache_of(request: pytest.FixtureRequest) -> Callable[[PreTrainedModel], Cache]:
    """Makes a tiered cache for a model, with its KV on the host, on the device, or in the smallest device budget."""

    def make(model: PreTrainedModel) -> Cache:
        def with_budget(budget: int | None) -> Cache:
            return tiered_cache(model, budget, block_size=BLOCK_SIZE)

        if request.param == "smallest":
            return with_budget(smallest_budget(with_budget, lambda cache: generate(model, cache)))
        return with_budget(ROOMY if request.param == "device" else None)

    return make


@contextmanager
def before_layer(model: PreTrainedModel, index: int, act: Callable[[int], None]) -> Iterator[None]:
    """Calls ``act(n)`` before the n-th time, from 0, that decoder layer `index` runs."""
    calls = iter(range(10**6))
    layer: nn.Module = model.model.layers[index]
    handle = layer.register_forward_pre_hook(lambda *_: act(next(calls)))
    try:
        yield
    finally:
        handle.remove()


def raises(call: int) -> None:
    raise PulledThePlug


@contextmanager
def interrupted_at(model: PreTrainedModel, step: int, error: type[BaseException]) -> Iterator[None]:
    """Forward number `step` of the body raises `error` in its middle layer; asserts that the error gets out."""

    def pull(call: int) -> None:
        if call == step:
            raise error

    with pytest.raises(error), before_layer(model, 1, pull):
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [PulledThePlug, KeyboardInterrupt])
@pytest.mark.parametrize("step", [0, 1, 4], ids=["prefill", "first_decode", "later"])
def test_crop_0_drops_an_unfinished_step(
    cache_of: Callable[[PreTrainedModel], Cache], step: int, error: type[BaseException]
) -> None:
    model = tiny_model("llama")
    expected = generate(model, dynamic_cache(model))
    cache = cache_of(model)
    with interrupted_at(model, step, error):
        generate(model, cache)
    with pytest.raises(InterruptedStepError, match=r"crop\(0\)"):
        model(input_ids=PROMPT[:, :1], past_key_values=cache)
    cache.crop(0)
    cache.check_integrity()
    finished = PROMPT.shape[1] + step - 1 if step else 0
    assert cache.get_seq_length() == finished
    assert torch.equal(generate(model, cache, expected[:, : max(finished + 1, PROMPT.shape[1])]), expected)
    cache.check_integrity()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("step", [0, 4], ids=["prefill", "later"])
def test_reset_after_an_interruption_is_a_new_start(
    cache_of: Callable[[PreTrainedModel], Cache], step: int, family: str
) -> None:
    model = tiny_model(family)
    expected = generate(model, dynamic_cache(model))
    cache = cache_of(model)
    with interrupted_at(model, step, PulledThePlug):
        generate(model, cache)
    with pytest.raises(InterruptedStepError, match="reset"):
        model(input_ids=PROMPT[:, :1], past_key_values=cache)
    cache.reset()
    cache.check_integrity()
    assert torch.equal(generate(model, cache), expected)


@pytest.mark.parametrize("step", [1, 4])
def test_crop_0_is_right_or_refused_where_windows_moved_on(step: int) -> None:
    """A sliding layer has dropped what the unfinished step pushed out, so going back may be impossible."""
    model = tiny_model("gemma3")
    expected = generate(model, dynamic_cache(model))
    cache = tiered_cache(model, block_size=BLOCK_SIZE)
    with interrupted_at(model, step, PulledThePlug):
        generate(model, cache)

    def go_on() -> torch.Tensor:
        cache.crop(0)
        return generate(model, cache, expected[:, : PROMPT.shape[1] + step])

    tokens = outcome(go_on)
    if isinstance(tokens, Exception):
        assert isinstance(tokens, InterruptedStepError)
        assert "reset" in str(tokens)
        cache.reset()
        tokens = generate(model, cache)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("tokens", [1, 2])
def test_crop_0_takes_back_a_forward_whose_past_is_recorded_behind_some_that_were_not(tokens: int) -> None:
    """The first layer is tiered: the windows of the step before are not those of this one."""
    model = build_model("gemma3", "sdpa", layer_types=["full_attention", "sliding_attention"] * 2)
    expected, cache = dynamic_cache(model), tiered_cache(model, block_size=BLOCK_SIZE)
    with torch.no_grad():
        for each in (expected, cache):
            for ids in (PROMPT, ONE, ONE + 1):
                model(input_ids=ids, past_key_values=each)
    cache.activate_past_recording()
    with pytest.raises(PulledThePlug), before_layer(model, 2, raises), torch.no_grad():
        model(input_ids=PROMPT[:, :tokens], past_key_values=cache)
    cache.crop(0)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert alike(theirs.keys, ours.keys + 0)
        assert alike(theirs.values, ours.values + 0)


@pytest.mark.parametrize(
    ("family", "tier"),
    [("llama", "device"), ("llama", "host"), ("gemma3", "device"), ("gemma3", "host"), ("deepseek_v3", "host")],
)
def test_a_budget_that_runs_out_loses_nothing(family: str, tier: Literal["device", "host"]) -> None:
    model = tiny_model(family)

    def make(**budgets: int) -> Cache:
        return TieredKVCache(model.config, block_size=BLOCK_SIZE, host_attention=False, **budgets)

    above: dict[str, int] = {}
    if tier == "host" and not ON_HOST:
        # Or the device would take everything: so much that it is not the first to run out.
        above["device_budget"] = smallest_budget(lambda n: make(device_budget=n), lambda cache: generate(model, cache))

    def with_budget(budget: int) -> Cache:
        return make(**{f"{tier}_budget": budget}, **above)

    def prefill(cache: Cache) -> torch.Tensor:
        return model(input_ids=PROMPT, past_key_values=cache).logits

    enough_to_begin = smallest_budget(with_budget, prefill, tier)
    cache = with_budget(enough_to_begin)
    with pytest.raises(BudgetError) as refusal:
        model.generate(PROMPT, past_key_values=cache, max_new_tokens=100, do_sample=False)
    assert (refusal.value.tier, refusal.value.budget) == (tier, enough_to_begin)
    cache.check_integrity()
    cache.crop(0)
    length = cache.get_seq_length()
    assert length >= PROMPT.shape[1]
    expected = dynamic_cache(model)
    model.generate(PROMPT, past_key_values=expected, max_new_tokens=length - PROMPT.shape[1] + 1, do_sample=False)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        assert alike(theirs.keys, ours.keys + 0)
        assert alike(theirs.values, ours.values + 0)
    cache.reset()
    assert alike(prefill(dynamic_cache(model)), prefill(cache))


MISUSES: dict[str, Callable[[], tuple[PreTrainedModel, torch.Tensor]]] = {
    "other_head_size": lambda: (build_model("llama", "sdpa", head_dim=20), ONE),
    "other_number_of_heads": lambda: (build_model("llama", "sdpa", num_key_value_heads=4), ONE),
    # Where torch may attend with another kernel, bfloat16 does not tell the likeliest token from the next.
    "other_dtype": lambda: (build_model("llama", "sdpa").to(torch.bfloat16 if ON_HOST else torch.float64), ONE),
    "more_rows": lambda: (tiny_model("llama"), prompt_ids(rows=3, length=1)),
    "fewer_rows": lambda: (tiny_model("llama"), prompt_ids(rows=1, length=1)),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_does_not_fit_a_used_cache_is_refused_and_harms_nothing(
    cache_of: Callable[[PreTrainedModel], Cache], misuse: str
) -> None:
    model = tiny_model("llama")
    expected = generate(model, dynamic_cache(model))
    cache = cache_of(model)
    first = model.generate(PROMPT, past_key_values=cache, max_new_tokens=4, do_sample=False)
    other, ids = MISUSES[misuse]()
    with pytest.raises(MismatchError):
        other(input_ids=ids, past_key_values=cache)
    cache.check_integrity()
    assert torch.equal(generate(model, cache, first), expected)


def test_who_wants_beams_of_a_warm_cache_of_one_row_is_told_how() -> None:
    model = tiny_model("llama")
    beams = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3, "return_dict_in_generate": True}
    with tiered_cache(model, ROOMY, block_size=BLOCK_SIZE) as cache:
        first = model.generate(PROMPT[:1], past_key_values=cache, max_new_tokens=4, do_sample=False)
        with pytest.raises(MismatchError, match="repeat them with `batch_repeat_interleave`"):
            model.generate(first, past_key_values=cache, **beams)
        cache.batch_repeat_interleave(3)
        found = model.generate(first, past_key_values=cache, **beams).sequences
    assert torch.equal(found, model.generate(first, **beams).sequences)


@pytest.mark.parametrize("misuse", MISUSES)
def test_after_reset_anything_fits(misuse: str) -> None:
    model = tiny_model("llama")
    cache = tiered_cache(model, ROOMY, block_size=BLOCK_SIZE)
    generate(model, cache)
    cache.reset()
    other, ids = MISUSES[misuse]()
    prompt = ids.repeat(1, 9)
    expected = other.generate(prompt, past_key_values=dynamic_cache(other), max_new_tokens=6, do_sample=False)
    actual = other.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(actual, expected)
    cache.check_integrity()


# What they need is made beforehand: a thread of its own has another default device.
INTRUSIONS: dict[str, Callable[[PreTrainedModel, Cache], Any]] = {
    "forward": lambda other, cache: other(input_ids=ONE, past_key_values=cache),
    "crop": lambda other, cache: cache.crop(-1),
    "reset": lambda other, cache: cache.reset(),
    "reorder": lambda other, cache: cache.reorder_cache(ONE[:, 0] * 0),
    "select": lambda other, cache: cache.batch_select_indices(ONE[:1, 0] * 0),
}
#: Any thread may need these after another thread's forward has failed, which cannot be told from one that still runs.
WAYS_BACK = ("crop", "reset")


def _in_a_thread(act: Callable[[], Any]) -> list[BaseException]:
    """Runs `act` in a thread of its own, to its end; the exception it raised, if any."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive(), "the second thread hangs"
    return raised


@pytest.mark.sampled(3)
@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("step", [0, 3], ids=["prefill", "decode"])
def test_a_second_thread_in_the_middle_of_a_forward_is_refused(
    cache_of: Callable[[PreTrainedModel], Cache], step: int, intrusion: str
) -> None:
    model, other = tiny_model("llama"), build_model("llama", "sdpa")
    expected = generate(model, dynamic_cache(model))
    cache = cache_of(model)
    raised: list[BaseException] = []

    def intrude(call: int) -> None:
        if call == step:
            raised.extend(_in_a_thread(lambda: INTRUSIONS[intrusion](other, cache)))

    with before_layer(model, 1, intrude):
        tokens = outcome(lambda: generate(model, cache))
    if intrusion in WAYS_BACK and not raised:
        assert isinstance(tokens, KVTierError), "what the second thread removed, the first must be told"
    else:
        assert [type(error) for error in raised] == [ConcurrentUseError]
        assert torch.equal(tokens, expected), "the first thread must not notice"
    cache.check_integrity()


@pytest.mark.parametrize("end", [TieredKVCache.close, TieredKVCache.reset], ids=["close", "reset"])
@pytest.mark.parametrize(("attention", "interrupted"), [("sdpa", False), ("eager", False), ("sdpa", True)])
@torch.no_grad()
def test_what_another_thread_is_reading_is_given_back_once_it_was_read(
    attention: str, interrupted: bool, end: Callable[[TieredKVCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where whoever reads a stream of tokens stops in its middle, and leaves the block of the cache."""
    model, cache = tiny_model("llama", attention), TieredKVCache(block_size=BLOCK_SIZE)
    model(input_ids=PROMPT, past_key_values=cache)
    reads, ended, seen = threading.Event(), threading.Event(), list[bool]()
    where, name = (dispatch, "attend") if attention == "sdpa" else (forward_module, "own_kv")
    read = getattr(where, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        reads.set()
        seen.append(ended.wait(timeout=0.2))
        if seen[-1]:
            raise RuntimeError("what is read is gone")
        return read(*args, **kwargs)

    monkeypatch.setattr(where, name, slow)

    interrupts = [KeyboardInterrupt()] * interrupted

    def pause(seconds: float) -> None:
        if interrupts:
            raise interrupts.pop()
        time.sleep(seconds)

    monkeypatch.setattr(steps, "time", SimpleNamespace(sleep=pause))

    def stop() -> None:
        assert reads.wait(timeout=60)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                end(cache)
        end(cache)
        ended.set()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    told = outcome(lambda: model(input_ids=ONE, past_key_values=cache))
    thread.join(timeout=60)
    assert ended.is_set()
    assert not any(seen)
    assert isinstance(told, KVTierError), "the next layer is told"


@pytest.mark.parametrize("end", [TieredKVCache.close, TieredKVCache.reset], ids=["close", "reset"])
def test_two_threads_may_end_at_a_time_what_a_third_one_is_reading(
    end: Callable[[TieredKVCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, waiting, failed = TieredKVCache(block_size=BLOCK_SIZE), set[int](), list[BaseException]()
    tiny_model("llama")(input_ids=PROMPT, past_key_values=cache)

    def pause(seconds: float) -> None:
        waiting.add(threading.get_ident())
        time.sleep(seconds)

    monkeypatch.setattr(steps, "time", SimpleNamespace(sleep=pause))

    def stop() -> None:
        try:
            end(cache)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=stop, daemon=True) for _ in range(2)]
    with cache._forward.steps.guard:
        for thread in threads:
            thread.start()
        limit = time.monotonic() + 60
        while len(waiting) < 2 and time.monotonic() < limit:
            time.sleep(0.001)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert len(waiting) == 2
    assert not failed


def test_threads_may_take_turns(cache_of: Callable[[PreTrainedModel], Cache]) -> None:
    model = tiny_model("llama")
    expected = generate(model, dynamic_cache(model))
    cache = cache_of(model)
    first: list[torch.Tensor] = []
    assert not _in_a_thread(
        lambda: first.append(model.generate(PROMPT, past_key_values=cache, max_new_tokens=4, do_sample=False))
    )
    assert torch.equal(generate(model, cache, first[0]), expected)


def test_a_closed_cache_says_so() -> None:
    model = tiny_model("llama")
    with tiered_cache(model, block_size=BLOCK_SIZE) as cache:
        generate(model, cache)
    with pytest.raises(ClosedError):
        model(input_ids=PROMPT[:, :1], past_key_values=cache)


@torch.no_grad()
def test_crop_0_asks_for_a_reset_where_a_state_was_changed_and_only_there() -> None:
    model = model_of("jamba")
    cache = TieredKVCache(model.config)
    forwards(model, cache, 5, 6)
    layer, operator = model.model.layers[0], model.model.layers[0].mamba.x_proj
    with pytest.raises(PulledThePlug), at_module(layer, "before"):
        forward(model, cache, 6, 7)
    cache.crop(0)
    assert same(forwards(model, cache, 7, begin=6), forwards(model, dynamic_cache(model), 5, 6, 7)[-1:])
    with pytest.raises(PulledThePlug), at_module(operator, "before"):
        forward(model, cache, 7, 8)
    with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
        cache.crop(0)


@torch.no_grad()
def test_a_step_that_the_budget_refuses_half_way_asks_for_a_reset() -> None:
    model = model_of("jamba")
    budgets = dict.fromkeys(["host"] if ON_HOST else ["device", "host"], 1)
    refused = 0
    while True:
        cache = TieredKVCache(model.config, block_size=4, **{f"{tier}_budget": n for tier, n in budgets.items()})
        refusal = outcome(lambda cache=cache: forwards(model, cache, 4))
        if not isinstance(refusal, BudgetError):
            break
        budgets[refusal.tier] = refusal.needed
        refused += 1
    assert 0 < refused <= len(budgets), "the budget that is named works"
    with pytest.raises(BudgetError):
        forward(model, cache, 4, 5)
    with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
        forward(model, cache, 4, 5)
    cache.reset()
    assert same(forwards(model, cache, 4), forwards(model, dynamic_cache(model), 4))


@torch.no_grad()
def test_an_update_that_raises_before_it_changes_anything_harms_nothing() -> None:
    model = model_of("qwen3_next")
    cache = TieredKVCache(model.config)
    forwards(model, cache, 5, 6)
    held = cache.layers[0].conv_states[0]
    with pytest.raises(RuntimeError):
        cache.update_conv_state(held[:1], 0)  # another batch
    assert same(forwards(model, cache, 9, begin=6), forwards(model, dynamic_cache(model), 5, 6, 9)[-1:])


@pytest.mark.parametrize("index", range(4))
@torch.no_grad()
def test_a_second_thread_in_the_middle_of_a_forward_mixes_nothing(index: int) -> None:
    model = model_of("jamba")
    cache = TieredKVCache(model.config, block_size=4)
    forwards(model, cache, 5, 6)
    intruder: list[Any] = []

    def intrude(*_: Any) -> None:
        handle.remove()
        intruder.append(in_a_thread(lambda: forward(model, cache, 6, 7)))

    handle = model.model.layers[index].register_forward_hook(intrude)
    results = [outcome(lambda: forward(model, cache, 6, 7)), *intruder]
    assert same(results[:1], forwards(model, dynamic_cache(model), 5, 6, 7)[-1:]), "the first thread must not notice"
    # After the last layer, the forward has ended for all that a cache can see.
    assert isinstance(results[1], ConcurrentUseError) == (index < 3)


@torch.no_grad()
def test_a_copy_notices_an_interruption_as_the_original_does() -> None:
    model = model_of("jamba_last")
    cache = TieredKVCache(model.config)
    forwards(model, cache, 5, 6)
    for one in (copy.deepcopy(cache), cache):
        with pytest.raises(PulledThePlug), at_module(model.model.layers[-1], "before"):
            forward(model, one, 6, 7)
        with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
            forward(model, one, 6, 7)


@torch.no_grad()
def test_a_cache_that_is_dropped_gives_its_states_back_at_once() -> None:
    model = model_of("jamba_last")
    cache = TieredKVCache(model.config)
    forwards(model, cache, 5, 6)
    state = weakref.ref(cache.layers[0].recurrent_states[0])
    del cache
    assert state() is None


@pytest.mark.parametrize("recorded", [False, True], ids=["as-made", "past-recorded"])
@pytest.mark.parametrize("tokens", [0, -3])
@pytest.mark.parametrize("name", ["gemma3", "mistral_sliding", "llama", "qwen3_next", "jamba"])
def test_a_crop_of_an_empty_cache_changes_nothing(name: str, tokens: int, recorded: bool) -> None:
    """`crop(0)` is what an error's message names, wherever the error came."""
    cache = TieredKVCache(tiny_model(name).config)
    if recorded:
        cache.activate_past_recording()
    cache.crop(tokens)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_first_forward_that_does_not_fit_is_dropped_where_sliding_layers_hold_nothing_yet(name: str) -> None:
    model = tiny_model(name, "eager")
    ids = prompt_ids(rows=1, length=100)
    device_budget = None if ON_HOST else 20_000
    cache = TieredKVCache(model.config, device_budget=device_budget, host_budget=20_000, block_size=16)
    with torch.no_grad():
        with pytest.raises(BudgetError):
            model(ids, past_key_values=cache)
        cache.crop(0)
        assert cache.get_seq_length() == 0
        expected = model(ids[:, :10], past_key_values=dynamic_cache(model)).logits
        actual = model(ids[:, :10], past_key_values=cache).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    cache.check_integrity()


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_cache_for_which_there_is_no_memory_says_nothing_of_the_config(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise kind("out of memory")

    monkeypatch.setattr(layers, "DynamicCache", fails)
    with pytest.raises(kind, match=r"^out of memory$"):
        TieredKVCache(tiny_model("llama").config)
