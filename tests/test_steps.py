"""A forward that ends in the middle leaves a cache that goes back exactly, or says that it cannot go on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen3NextConfig

from kvtier import ConcurrentUseError, InterruptedStepError, TieredKVCache
from kvtier.forward.steps import Guard
from kvtier.memory.storage.pool import BlockPool

LAYERS, ROWS, HEADS, DIM, BLOCK_SIZE = 4, 2, 2, 8, 4
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_key_value_heads=HEADS)

Held = list[tuple[torch.Tensor, torch.Tensor]]


def tokens(count: int, seed: int) -> Held:
    """New keys and values for every layer."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, HEADS, count, DIM, generator=rng), torch.randn(ROWS, HEADS, count, DIM, generator=rng))
        for _ in range(LAYERS)
    ]


def forward(cache: TieredKVCache, new: Held, until: int = LAYERS) -> None:
    """Update the first `until` layers."""
    for i, (k, v) in enumerate(new[:until]):
        cache.update(k, v, i)


def joined(*parts: Held) -> Held:
    """One after the other."""
    return [
        (torch.cat([p[i][0] for p in parts], 2), torch.cat([p[i][1] for p in parts], 2)) for i in range(len(parts[0]))
    ]


def check(cache: TieredKVCache, held: Held) -> None:
    """Every layer holds exactly this; every count agrees."""
    cache.check_integrity()
    for i, (k, v) in enumerate(held):
        assert cache.get_seq_length(i) == k.shape[2]
        assert torch.equal(cache.layers[i].keys, k)
        assert torch.equal(cache.layers[i].values, v)


@pytest.fixture(params=[None, 20_000, 10**6], ids=["host", "spilled", "device"])
def make(request: pytest.FixtureRequest) -> Callable[..., TieredKVCache]:
    """Makes a cache at each placement; with or without the model's config."""

    def cache(config: LlamaConfig | None = CONFIG) -> TieredKVCache:
        return TieredKVCache(config, device_budget=request.param, host_budget=10**7, block_size=BLOCK_SIZE)

    return cache


USES: dict[str, Callable[[TieredKVCache], Any]] = {
    "update": lambda cache: forward(cache, tokens(1, 9)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "pickle": lambda cache: cache.__getstate__(),
}


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "no_config"])
@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("until", range(1, LAYERS))
def test_wherever_a_step_ends_crop_0_restores_exactly_and_the_cache_goes_on(
    make: Callable[..., TieredKVCache], until: int, count: int, config: LlamaConfig | None
) -> None:
    cache = make(config)
    first, second, third = tokens(6, 1), tokens(count, 2), tokens(2, 3)
    forward(cache, first)
    forward(cache, second, until)
    for use in USES.values():
        with pytest.raises(InterruptedStepError, match=r"crop\(0\)"):
            use(cache)
    for _ in range(2):
        cache.crop(0)
        check(cache, first)
    forward(cache, third)
    check(cache, joined(first, third))


@pytest.mark.parametrize("until", range(1, LAYERS))
def test_a_first_step_that_ends_early_is_dropped_whole(make: Callable[..., TieredKVCache], until: int) -> None:
    cache = make()
    forward(cache, tokens(6, 1), until)
    with pytest.raises(InterruptedStepError):
        forward(cache, tokens(6, 2))
    cache.crop(0)
    assert cache.get_seq_length() == 0
    forward(cache, tokens(6, 2))
    check(cache, tokens(6, 2))


@pytest.mark.parametrize("until", range(1, LAYERS))
def test_without_a_config_a_first_step_that_ended_early_is_found_out_in_the_second(
    make: Callable[..., TieredKVCache], until: int
) -> None:
    cache = make(None)
    forward(cache, tokens(6, 1), until)
    with pytest.raises(InterruptedStepError, match="reset"):
        forward(cache, tokens(6, 1))
    cache.reset()
    forward(cache, tokens(6, 1))
    check(cache, tokens(6, 1))


def test_a_crop_drops_the_unfinished_step_first(make: Callable[..., TieredKVCache]) -> None:
    cache = make()
    forward(cache, tokens(6, 1))
    forward(cache, tokens(3, 2), 2)
    cache.crop(-2)
    check(cache, [(k[:, :, :4], v[:, :, :4]) for k, v in tokens(6, 1)])


@pytest.mark.parametrize("count", [1, 7])
def test_a_signal_inside_a_change_is_remembered_until_reset(
    make: Callable[..., TieredKVCache], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """`KeyboardInterrupt` at every allocation of a step in turn."""
    real = BlockPool.take
    for nth in range(100):
        cache = make()
        first = tokens(BLOCK_SIZE, 1)
        forward(cache, first)
        left = [nth]

        def allocate(self: BlockPool, *args: Any, left: list[int] = left, **kwargs: Any) -> int | None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(self, *args, **kwargs)

        monkeypatch.setattr(BlockPool, "take", allocate)
        try:
            forward(cache, tokens(count, 2))
        except KeyboardInterrupt:
            monkeypatch.undo()
        else:
            monkeypatch.undo()
            assert nth >= LAYERS, "the law was put to the test"
            return
        for name, use in {**USES, "crop": lambda cache: cache.crop(-1)}.items():
            try:
                use(cache)
            except InterruptedStepError:
                continue
            pytest.fail(f"{name} went on after a signal in allocation {nth}")
        for i, (k, _) in enumerate(first):
            try:
                seen = cache.layers[i].keys.dense()
            except InterruptedStepError:
                continue
            assert torch.equal(seen[:, :, :BLOCK_SIZE], k), "what is still shown must be right"
        assert repr(cache)
        assert cache.stats.steps
        cache.reset()
        forward(cache, first)
        check(cache, first)
    raise AssertionError("a step does not allocate so often")


def in_a_thread(act: Callable[[], Any]) -> type[BaseException] | None:
    """What `act` raised in a thread of its own."""
    raised: list[type[BaseException]] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(120)
    return raised[0] if raised else None


@pytest.mark.parametrize("until", range(1, LAYERS))
def test_a_second_thread_in_the_middle_of_a_step_is_refused_and_harms_nothing(
    make: Callable[..., TieredKVCache], until: int
) -> None:
    cache = make()
    first, second = tokens(6, 1), tokens(2, 2)
    forward(cache, first)
    forward(cache, second, until)
    other = tokens(2, 3)
    assert in_a_thread(lambda: cache.update(*other[until], until)) is ConcurrentUseError
    assert in_a_thread(lambda: cache.update(*other[0], 0)) is ConcurrentUseError
    for i in range(until, LAYERS):
        cache.update(*second[i], i)
    check(cache, joined(first, second))
    assert in_a_thread(lambda: forward(cache, other)) is None, "whole steps may come from any thread"
    check(cache, joined(first, second, other))


def test_two_threads_at_once_take_turns_until_they_meet_and_then_neither_goes_on(
    make: Callable[..., TieredKVCache],
) -> None:
    cache = make()
    first = tokens(6, 1)
    forward(cache, first)
    start = threading.Barrier(2)
    outcomes: list[str] = []

    def worker(seed: int) -> None:
        start.wait()
        for n in range(30):
            try:
                forward(cache, tokens(1, 100 * seed + n))
            except (ConcurrentUseError, InterruptedStepError):
                outcomes.append("refused")
            else:
                outcomes.append("done")

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(outcomes) == 60, "a thread died of another error"
    try:
        cache.crop(0)
    except ConcurrentUseError:
        for use in USES.values():
            with pytest.raises(ConcurrentUseError, match=r"reset\(\)"):
                use(cache)
        cache.reset()
        forward(cache, first)
        check(cache, first)
        return
    assert {cache.get_seq_length(i) for i in range(LAYERS)} == {6 + outcomes.count("done")}
    check(cache, [(cache.layers[i].keys.dense(), cache.layers[i].values.dense()) for i in range(LAYERS)])
    for i, (k, _) in enumerate(first):
        assert torch.equal(cache.layers[i].keys[:, :, :6], k)


def test_a_layer_that_is_new_in_a_second_step_is_refused(make: Callable[..., TieredKVCache]) -> None:
    cache = make(None)
    forward(cache, tokens(3, 1), LAYERS - 1)
    second = tokens(1, 2)
    forward(cache, second, LAYERS - 1)
    with pytest.raises(InterruptedStepError, match="new to a cache"):
        cache.update(*second[-1], LAYERS - 1)
    check(cache, joined(tokens(3, 1), second)[:-1])


@pytest.mark.parametrize("passed_over", [(0,), (1,), (0, 2), (1, 2)])
def test_layers_that_a_model_passes_over_are_not_missed(
    make: Callable[..., TieredKVCache], passed_over: tuple[int, ...]
) -> None:
    """A config may name layers without KV of their own, and cross-attention has its KV from the first forward on."""
    cache, new = make(), tokens(3, 1)
    ran = [i for i in range(LAYERS) if i not in passed_over]
    for _ in range(3):
        for i in ran:
            cache.update(*new[i], i)
    assert {cache.get_seq_length(i) for i in ran} == {9}
    for i in ran[:-1]:
        cache.update(*new[i], i)
    with pytest.raises(InterruptedStepError, match=r"crop\(0\)"):
        cache.update(*new[ran[0]], ran[0])
    cache.crop(0)
    assert {cache.get_seq_length(i) for i in ran} == {9}


def test_layers_of_cross_attention_may_have_a_length_of_their_own(make: Callable[..., TieredKVCache]) -> None:
    cache, text, image = make(), tokens(3, 1), tokens(5, 2)
    for i in range(LAYERS):
        cache.update(*(image if i == 1 else text)[i], i)
    for _ in range(3):
        for i in (0, 2, 3):
            cache.update(*text[i], i)
    assert [cache.get_seq_length(i) for i in range(LAYERS)] == [12, 5, 12, 12]
    check(cache, [x if i == 1 else y for i, (x, y) in enumerate(zip(image, joined(*[text] * 4), strict=True))])


HYBRID = Qwen3NextConfig(
    num_hidden_layers=LAYERS,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=HEADS,
    layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
)


def announce(cache: TieredKVCache, layer: int) -> None:
    """What a model asks just before it changes a state in place."""
    if hasattr(DynamicCache, "is_recording_past"):  # newer than 5.17
        cache.get_conv_state(layer)
        cache.is_recording_past(layer)
    else:
        cache.has_previous_state(layer)


def read(cache: TieredKVCache, layer: int) -> None:
    """What a model asks that does not say what it is going to do."""
    if hasattr(DynamicCache, "get_conv_state"):
        cache.get_conv_state(layer)
    else:
        cache.has_previous_state()


def events(cache: TieredKVCache, asks: Callable[[TieredKVCache, int], None], fused: bool) -> list[Callable[[], Any]]:
    """What a model does to a cache that was used before, in order, one token on.

    Args:
        cache: the cache.
        asks: how the model asks for a recurrent layer. Its convolution is then changed in place.
        fused: whether the recurrence, too, is changed in place, as by a fused kernel.
    """

    def conv(layer: int) -> None:
        asks(cache, layer)
        cache.layers[layer].conv_states[0].add_(1)

    def recurrence(layer: int) -> None:
        if fused:
            cache.layers[layer].recurrent_states[0].add_(1)
        else:
            cache.update_recurrent_state(cache.layers[layer].recurrent_states[0] + 1, layer)

    (k, v), *_ = tokens(1, 7)
    parts = (conv, recurrence, lambda layer: cache.update(k, v, layer + 1))
    return [partial(part, layer) for layer in range(0, LAYERS, 2) for part in parts]


def prefill_parts(cache: TieredKVCache) -> list[Callable[[], Any]]:
    """The first forward: the cache is asked for every change."""
    (k, v), *_ = tokens(5, 6)
    parts = (
        lambda layer: cache.update_conv_state(torch.zeros(ROWS, 6, 5), layer, conv_kernel_size=4),
        lambda layer: cache.update_recurrent_state(torch.zeros(ROWS, 4, 4), layer),
        lambda layer: cache.update(k, v, layer + 1),
    )
    return [partial(part, layer) for layer in range(0, LAYERS, 2) for part in parts]


def run(parts: list[Callable[[], Any]]) -> None:
    for act in parts:
        act()


@pytest.mark.parametrize(("asks", "fused"), [(announce, False), (announce, True), (read, False)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("decoded", [0, 2])
@pytest.mark.parametrize("done", range(7))
def test_a_forward_after_part_of_one_is_refused_and_after_a_whole_one_is_not(
    done: int, decoded: int, mode: Any, fused: bool, asks: Callable[[TieredKVCache, int], None]
) -> None:
    if asks is read and mode is torch.inference_mode and done == 1:
        pytest.skip("nothing tells the cache of it")
    with mode():
        cache = TieredKVCache(HYBRID)
        run(prefill_parts(cache) + events(cache, asks, fused) * decoded + events(cache, asks, fused)[:done])
        if done in (0, len(events(cache, asks, fused))):
            run(events(cache, asks, fused) * 2)
        else:
            for _ in range(2):
                with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
                    run(events(cache, asks, fused))
            for name in ("reorder", "pickle"):
                with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
                    USES[name](cache)
            with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
                cache.crop(0)
        cache.reset()
        run(prefill_parts(cache) + events(cache, asks, fused) * 2)
        assert cache.stats.steps == 3


@pytest.mark.parametrize("done", range(7))
def test_a_first_forward_that_ended_early_is_found_out_in_the_second(done: int) -> None:
    cache = TieredKVCache(HYBRID)
    run(prefill_parts(cache)[:done])
    if done in (0, len(prefill_parts(cache))):
        run(prefill_parts(cache))
        return
    for _ in range(2):
        with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
            run(prefill_parts(cache))


@pytest.mark.parametrize("strange_thread", [False, True])
def test_a_signal_between_any_two_instructions_leaves_a_guard_that_knows(strange_thread: bool) -> None:
    """A change that was cut short is refused, and nobody is told of a second thread that there is not."""

    def change(guard: Guard, done: list[str]) -> None:
        with guard:
            done.append("began")
            done.append("ended")

    def interrupted(at: int) -> bool:
        """Raise at the instruction `at` of the change and of what it calls; False if there are not so many."""
        guard, done, seen = Guard(), list[str](), 0
        if strange_thread:  # whoever came before leaves no name behind
            thread = threading.Thread(target=change, args=(guard, []))
            thread.start()
            thread.join()

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            change(guard, done)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        again: list[str] = []
        try:
            change(guard, again)
        except InterruptedStepError:
            assert not again
        else:
            assert done != ["began"], "a change that was cut short passes for whole"
        return seen >= at

    at = 1
    while interrupted(at):
        at += 1
    assert at > 30
