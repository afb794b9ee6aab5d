"""Two threads on one cache: one is refused before it changes anything, or both are. None goes on with wrong tokens."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import dynamic_cache, prompt_ids, tiny_model
from placements import outcome
from transformers import Cache, PreTrainedModel

from kvtier import ConcurrentUseError, KVTierError, TieredKVCache
from kvtier.hf.callers import threads

PROMPT, OTHER = prompt_ids(rows=1, length=100), prompt_ids(rows=1, length=100, seed=2)
ONE = OTHER[:, :1]
NEW_TOKENS = 60


def generate(model: PreTrainedModel, cache: Cache, prompt: torch.Tensor = PROMPT, count: int = 8, **more: Any) -> Any:
    seen = torch.ones_like(prompt)  # or generate would take some token for padding
    return model.generate(
        prompt, attention_mask=seen, past_key_values=cache, max_new_tokens=count, do_sample=False, **more
    )


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)


def elsewhere(act: Callable[[], Any]) -> Any:
    """The outcome of `act` in a thread of its own, run to its end."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(outcome, act).result(timeout=120)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that is in the way stays there while it is waited for."""
    monkeypatch.setattr(threads, "_LEAVING", 0.02)


@pytest.fixture(params=[True, False], ids=["config", "no_config"])
def cache(request: pytest.FixtureRequest) -> TieredKVCache:
    return TieredKVCache(tiny_model("llama").config if request.param else None, block_size=16)


INTRUSIONS: dict[str, Callable[[PreTrainedModel, Cache], Any]] = {
    "generate": lambda model, cache: generate(model, cache, OTHER),
    "forward": lambda model, cache: forward(model, cache, ONE),
    "crop": lambda model, cache: cache.crop(-1),
    "reset": lambda model, cache: cache.reset(),
    "reorder": lambda model, cache: cache.reorder_cache(ONE[0] * 0),
    "repeat": lambda model, cache: cache.batch_repeat_interleave(2),
    "select": lambda model, cache: cache.batch_select_indices(ONE[0] * 0),
    "pickle": lambda model, cache: cache.__getstate__(),
}


@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("step", [0, 3])
def test_between_two_forwards_of_a_generation_another_thread_is_refused_and_changes_nothing(
    cache: TieredKVCache, intrusion: str, step: int, impatient: None
) -> None:
    model = tiny_model("llama")
    raised: list[Any] = []

    def intrude(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == PROMPT.shape[1] + step:
            raised.append(elsewhere(lambda: INTRUSIONS[intrusion](model, cache)))
        return scores

    tokens = generate(model, cache, logits_processor=[intrude])
    assert [type(error) for error in raised] == [ConcurrentUseError]
    assert torch.equal(tokens, generate(model, dynamic_cache(model)))
    cache.check_integrity()


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_a_generation_is_not_disturbed_where_a_recurrent_layer_comes_first(name: str, impatient: None) -> None:
    model = tiny_model(name)
    cache = TieredKVCache(model.config, block_size=16)
    raised: list[Any] = []

    def intrude(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raised.append(elsewhere(lambda: forward(model, cache, ONE)))
        return scores

    tokens = generate(model, cache, count=3, logits_processor=[intrude])
    assert {type(error) for error in raised} == {ConcurrentUseError}
    assert torch.equal(tokens, generate(model, dynamic_cache(model), count=3))


def test_a_thread_that_generates_with_another_cache_by_now_is_not_in_the_way(cache: TieredKVCache) -> None:
    """Its frames are of the same functions, and may be at the addresses of those that are gone."""
    model = tiny_model("llama")
    outcomes: list[Any] = []

    def go_on(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        outcomes.append(elsewhere(lambda: forward(model, cache, ONE)))
        return scores

    for _ in range(3):
        generate(model, cache, count=2)
        generate(model, TieredKVCache(model.config), count=2, logits_processor=[go_on])
        cache.reset()
    assert len(outcomes) == 6
    assert all(isinstance(x, torch.Tensor) for x in outcomes), outcomes


def test_no_variable_of_another_threads_frame_is_read(cache: TieredKVCache, impatient: None) -> None:
    """To read them while that thread runs ends some processes with a segmentation fault."""
    model = tiny_model("llama")
    seen: list[Any] = []

    class Locals:
        """Stands for a frame, and tells who reads its variables."""

        def __init__(self, frame: Any) -> None:
            self.frame = frame

        def __getattr__(self, name: str) -> Any:
            seen.append(name)
            found = getattr(self.frame, name)
            return Locals(found) if name == "f_back" and found is not None else found

    def intrude(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        frames = sys._current_frames()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "_current_frames", lambda: {thread: Locals(x) for thread, x in frames.items()})
            elsewhere(lambda: forward(model, cache, ONE))
        return scores

    generate(model, cache, count=2, logits_processor=[intrude])
    assert "f_back" in seen
    assert "f_locals" not in seen


def test_who_is_told_that_a_generation_ends_may_go_on_before_that_thread_has_left_it(cache: TieredKVCache) -> None:
    """A streamer tells it from within `generate`."""
    model = tiny_model("llama")
    told, at_work = threading.Event(), threading.Event()

    class Streamer:
        def put(self, value: Any) -> None: ...

        def end(self) -> None:
            told.set()
            at_work.wait(120)
            time.sleep(0.05)

    whole = generate(model, dynamic_cache(model), count=12)
    thread = threading.Thread(target=generate, args=(model, cache), kwargs={"streamer": Streamer()})
    thread.start()
    told.wait(120)
    at_work.set()
    assert torch.equal(generate(model, cache, whole[:, : PROMPT.shape[1] + 8], count=4), whole)
    thread.join(120)


@contextmanager
def once_before_layer(model: PreTrainedModel, index: int, act: Callable[[], Any]) -> Iterator[list[Any]]:
    """The outcome of `act` in another thread, just before a layer of the next forward runs."""
    results: list[Any] = []

    def intrude(*_: Any) -> None:
        hook.remove()
        results.append(elsewhere(act))

    hook = model.model.layers[index].register_forward_pre_hook(intrude)
    try:
        yield results
    finally:
        hook.remove()


def test_after_two_threads_met_in_a_forward_nobody_goes_on(cache: TieredKVCache) -> None:
    model = tiny_model("llama")
    forward(model, cache, PROMPT)
    with ThreadPoolExecutor(1) as pool:

        def second(act: Callable[[], Any]) -> Any:
            return pool.submit(outcome, act).result(timeout=120)

        assert isinstance(second(lambda: forward(model, cache, OTHER)), torch.Tensor), "whole forwards may take turns"
        met: list[Any] = []
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda *_: met.append(second(lambda: forward(model, cache, ONE))) if not met else None
        )
        try:
            first = outcome(lambda: forward(model, cache, ONE))
        finally:
            hook.remove()
        assert [type(error) for error in (first, *met)] == [ConcurrentUseError] * 2
        for name, act in INTRUSIONS.items():
            if name != "reset":
                for error in (outcome(lambda act=act: act(model, cache)), second(lambda act=act: act(model, cache))):
                    assert isinstance(error, ConcurrentUseError)
                    assert "reset()" in str(error)
    cache.reset()
    assert torch.equal(generate(model, cache), generate(model, dynamic_cache(model)))
    cache.check_integrity()


def test_who_meets_a_forward_without_having_run_one_harms_nobody(cache: TieredKVCache) -> None:
    model, expected = tiny_model("llama"), dynamic_cache(tiny_model("llama"))
    for ids in (PROMPT, ONE, PROMPT[:, :3]):
        right = forward(model, expected, ids)
        if ids is not ONE:
            assert torch.equal(forward(model, cache, ids), right)
            continue
        with once_before_layer(model, 1, lambda: forward(model, cache, ONE)) as met:
            assert torch.equal(forward(model, cache, ids), right)
        assert isinstance(met[0], ConcurrentUseError)
    cache.check_integrity()


@pytest.mark.parametrize("index", [1, 2])
def test_two_threads_in_the_first_forward_of_a_cache_do_not_both_go_on(cache: TieredKVCache, index: int) -> None:
    """Without a config nobody knows yet how many layers make a forward."""
    model = tiny_model("llama")
    with once_before_layer(model, index, lambda: forward(model, cache, OTHER)) as met:
        first = outcome(lambda: forward(model, cache, PROMPT))
    assert isinstance(met[0], KVTierError) or isinstance(first, KVTierError)
    if not isinstance(first, KVTierError):
        assert torch.equal(first, forward(model, dynamic_cache(model), PROMPT))
    again = outcome(lambda: forward(model, cache, ONE))
    assert isinstance(again, KVTierError) == isinstance(first, KVTierError)


@pytest.mark.parametrize("both_ran", [True, False])
def test_a_forward_whose_mask_is_older_than_another_threads_forward_is_refused(
    cache: TieredKVCache, both_ran: bool
) -> None:
    model, expected = tiny_model("llama"), dynamic_cache(tiny_model("llama"))
    forward(model, expected, PROMPT)
    if both_ran:
        forward(model, cache, PROMPT)
    else:
        elsewhere(lambda: forward(model, cache, PROMPT))
    # The mask is made before the first layer.
    with once_before_layer(model, 0, lambda: forward(model, cache, ONE)) as between:
        assert isinstance(outcome(lambda: forward(model, cache, PROMPT[:, :3])), ConcurrentUseError)
    assert torch.equal(between[0], forward(model, expected, ONE))
    again = outcome(lambda: forward(model, cache, ONE))
    if both_ran:
        assert isinstance(again, ConcurrentUseError), "the other thread's forward was on this one's tokens"
    else:
        assert torch.equal(again, forward(model, expected, ONE))


def test_a_pool_of_threads_may_serve_one_conversation_step_by_step(cache: TieredKVCache) -> None:
    model = tiny_model("llama")
    with ThreadPoolExecutor(3) as pool:
        started = threading.Barrier(3)
        list(pool.map(lambda _: started.wait(120), range(3)))  # so that all of them serve
        ids, told = PROMPT, []
        for _ in range(12):
            ids = pool.submit(forward, model, cache, ids).result(timeout=120)
            told.append(ids)
    assert torch.equal(torch.cat([PROMPT, *told], 1), generate(model, dynamic_cache(model), count=12))


def _race(model: PreTrainedModel, cache: Cache, runs: list[Callable[[], Any]], delay: float) -> list[Any]:
    """The outcomes of two runs in two threads, the second begun later."""
    results: list[Any] = [None, None]

    def run(which: int) -> None:
        results[which] = outcome(runs[which])

    pair = [threading.Thread(target=run, args=(which,), daemon=True) for which in (0, 1)]
    pair[0].start()
    time.sleep(delay)
    pair[1].start()
    for thread in pair:
        thread.join(120)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_of_two_generations_at_once_none_ends_with_wrong_tokens(runs: int) -> None:
    model = tiny_model("llama")
    expected = [generate(model, dynamic_cache(model), ids, NEW_TOKENS) for ids in (PROMPT, OTHER)]
    rng = random.Random(0)
    for n in range(runs):
        cache = TieredKVCache(model.config if n % 2 else None, block_size=16)
        acts = [lambda ids=ids, cache=cache: generate(model, cache, ids, NEW_TOKENS) for ids in (PROMPT, OTHER)]
        results = _race(model, cache, acts, rng.uniform(0, 0.02))
        for result, right in zip(results, expected, strict=True):
            assert isinstance(result, KVTierError) or (
                not isinstance(result, Exception) and torch.equal(result, right)
            ), (n, result)
        cache.reset()
        assert torch.equal(generate(model, cache, count=2), expected[0][:, : PROMPT.shape[1] + 2])


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_of_two_loops_at_once_none_goes_on_after_they_met(runs: int) -> None:
    """Loops of forwards written by hand. Until they meet in a forward, nobody can tell that they are not one."""
    model = tiny_model("llama")
    rng = random.Random(1)
    for n in range(runs):
        cache = TieredKVCache(model.config if n % 2 else None, block_size=16)
        refused = threading.Event()
        late: list[int] = []

        def loop(ids: torch.Tensor, cache: Cache = cache, refused: Any = refused, late: list[int] = late) -> None:
            for step in range(NEW_TOKENS):
                known = refused.is_set()
                try:
                    ids = forward(model, cache, ids)
                except BaseException:
                    if step:  # what the cache holds is of this loop too
                        refused.set()
                    raise
                if known:
                    late.append(step)

        results = _race(model, cache, [lambda ids=ids: loop(ids) for ids in (PROMPT, OTHER)], rng.uniform(0, 0.02))
        for result in results:
            assert result is None or isinstance(result, KVTierError), (n, result)
        assert not late, "a forward went through after two threads had met"
