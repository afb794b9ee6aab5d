"""Threads that share a memory: whatever the order in which they come, each holds what its dense model holds."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from scenes import ACTS, PLACES, READS, Scene, play
from stepped import Deadlock, Turns, check_lock
from torch.nn import functional as F
from walk import ENGINES, Walk

from kvtier import BudgetError, ClosedError, MemoryInUseError, TieredKVCache, TieredMemory
from kvtier.testing import held, with_doubles

Patch = pytest.MonkeyPatch
HEADS, DIM, LAYERS = 2, 8, 2
#: Walks of threads with each engine; KVTIER_TEST_OPERATIONS asks for more.
WALKS = max(4, int(os.environ.get("KVTIER_TEST_OPERATIONS", "0")) // 2000)
#: The same of three threads that change places often.
BUSY_WALKS = max(2, int(os.environ.get("KVTIER_TEST_OPERATIONS", "0")) // 500)


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    """A deadlock ends the tests and shows where every thread is."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# Every order, one thread at a time


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(WALKS))
def test_threads_that_take_turns_hold_what_dense_caches_hold(engine: str, seed: int, monkeypatch: Patch) -> None:
    turns = Turns(seed)
    trip = Walk(5000 + seed, ENGINES[engine](seed), turns=turns)
    check_lock(monkeypatch, turns)
    trip.run_in_turns(20)
    assert turns.switches > 20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(BUSY_WALKS))
def test_three_threads_that_change_places_often_hold_what_dense_caches_hold(engine: str, seed: int) -> None:
    Walk(20_000 + seed, ENGINES[engine](seed), members=3, turns=Turns(seed, chance=0.5)).run_in_turns(20)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(max(1, BUSY_WALKS // 4)))
def test_threads_that_park_and_continue_hold_what_dense_caches_hold(engine: str, seed: int) -> None:
    trip = Walk(30_000 + seed, ENGINES[engine](seed), members=3, turns=Turns(seed, chance=0.5), parking=True)
    trip.run_in_turns(20)


@pytest.mark.parametrize(("seed", "engine"), [(361, "held"), (211, "held, any order")])
def test_what_others_free_while_a_full_host_waits_is_found(seed: int, engine: str) -> None:
    # In these orders a thread that was admitted was refused in the middle of its forward: room had come meanwhile, or
    # was there in slots of another layout.
    Walk(900 + seed, ENGINES[engine](seed), members=3, turns=Turns(seed, chance=0.5)).run_in_turns(20)


def test_a_smaller_budget_takes_nothing_from_who_was_promised_more_room() -> None:
    # A thread was refused in the middle of its forward: a resize had priced what others read through at the new budget.
    Walk(20_043, ENGINES["held, any order"](43), members=3, turns=Turns(43, chance=0.5)).run_in_turns(20)


def test_nobody_is_promised_what_a_resize_under_way_takes_away() -> None:
    memory = TieredMemory(device_budget=20_000, host_budget=100_000)
    x = torch.zeros(1, HEADS, 40, DIM)
    with TieredKVCache(memory=memory, block_size=4) as first, TieredKVCache(memory=memory, block_size=4) as second:
        first.update(x, x, 0)
        with memory.lock:
            reading = memory.readers.begin()
        errors: list[BaseException] = []

        def shrink() -> None:
            try:
                memory.resize(device_budget=4000)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=shrink)
        thread.start()
        while memory.devices[0].slabs.budget.goal is None and thread.is_alive():  # type: ignore[union-attr]
            time.sleep(0.001)
        assert thread.is_alive(), "nobody waits for the reader"
        with pytest.raises(BudgetError):  # its row is filled on the device: more than there is going to be
            second.update(*[torch.zeros(9, HEADS, 3, DIM).copy_(torch.arange(9.0).view(9, 1, 1, 1))] * 2, 0)
        with memory.lock:
            memory.readers.end(reading)
        thread.join()
        assert not errors
        assert memory.stats.device.bytes <= 4000
        second.update(x, x, 0)
        memory.check_integrity()


@pytest.mark.parametrize(("seed", "engine"), [(140, "asynchronous"), (145, "late"), (437, "asynchronous")])
def test_what_one_thread_reads_through_is_no_more_than_was_promised_to_it(seed: int, engine: str) -> None:
    # In these orders another thread's workspace, a little larger than promised, was in use where a slot was needed.
    Walk(900 + seed, ENGINES[engine](seed), members=3, turns=Turns(seed, chance=0.5)).run_in_turns(20)


def test_two_threads_that_reclaim_at_a_time_end() -> None:
    # In this order one had ended while the other waited for readers, and blocks came back from the host for ever.
    Walk(2873, ENGINES["late"](1973), members=3, turns=Turns(1973, chance=0.5)).run_in_turns(20)


def test_a_policy_that_wants_more_room_than_there_is_ends() -> None:
    # In this order blocks come back from a full host as fast as others leave the device.
    Walk(995, ENGINES["held, any order"](95), members=3, turns=Turns(95, chance=0.5)).run_in_turns(20)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("read", READS)
def test_a_reader_reads_right_whatever_happens_where_it_lets_go_of_the_lock(
    read: str, act: Callable[[Scene], None]
) -> None:
    places = next(place for place in range(PLACES) if not play(read, act, place))
    assert places > 5


def test_a_deadlock_is_an_error() -> None:
    turns = Turns(0)
    memory = TieredMemory()
    turns.install(memory)

    def wait() -> None:
        with memory.lock:
            memory.readers._ended.wait()

    with pytest.raises(Deadlock):
        turns.run([wait, wait])


def test_the_lock_that_nobody_takes_is_missed(monkeypatch: Patch) -> None:
    turns = Turns(0)
    memory = TieredMemory(device_budget=10_000, host_budget=10_000)
    turns.install(memory)
    check_lock(monkeypatch, turns)
    with pytest.raises(AssertionError, match="without the memory's lock"):
        memory.on(torch.device("cpu"))
    with memory.lock:
        memory.on(torch.device("cpu"))


# Real threads


def decode(memory: TieredMemory, seed: int, steps: int, block_size: int) -> None:
    """A prompt and so many tokens, each layer compared with a dense cache."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, DIM, generator=generator, device="cpu")

    dense: list[tuple[torch.Tensor, torch.Tensor]] = []
    with TieredKVCache(memory=memory, block_size=block_size, host_attention=seed % 2 == 0) as cache:
        for step in range(steps):
            tokens = 1 if step % 7 else 9
            for i in range(LAYERS):
                k, v = draw(HEADS, tokens), draw(HEADS, tokens)
                views = cache.update(k, v, i)
                if not step:
                    dense.append((k, v))
                    continue
                dense[i] = (torch.cat([dense[i][0], k], 2), torch.cat([dense[i][1], v], 2))
                total = dense[i][0].shape[2]
                mask = torch.ones(tokens, total, dtype=torch.bool).tril(total - tokens)[None, None]
                query = draw(2 * HEADS, tokens)
                out = F.scaled_dot_product_attention(query, *views, attn_mask=mask, enable_gqa=True)
                right = F.scaled_dot_product_attention(query, *dense[i], attn_mask=mask, enable_gqa=True)
                torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
            if step % 11 == 10:
                cache.crop(-5)
                dense = [(k[:, :, :-5], v[:, :, :-5]) for k, v in dense]
            if step % 13 == 12:
                cache.reorder_cache(torch.tensor([1, 1]))
                dense = [(k[[1, 1]], v[[1, 1]]) for k, v in dense]


def at_once(jobs: list[Callable[[], None]]) -> None:
    """Run all in threads. Raises what one of them raises."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("engine", ["inline", "held, any order", "late"])
def test_threads_at_once_hold_what_dense_caches_hold(engine: str) -> None:
    memory = with_doubles(TieredMemory(device_budget=80_000, host_budget=400_000), ENGINES[engine](0))
    at_once([lambda seed=seed: decode(memory, seed, 60, (1, 4, 16)[seed % 3]) for seed in range(4)])
    memory.check_integrity()
    stats = memory.stats
    assert stats.evictions
    assert stats.block_fetches
    assert (stats.device.used_blocks, stats.host.used_blocks) == (0, 0)
    memory.close()


def test_caches_come_and_go_while_others_run() -> None:
    memory = with_doubles(TieredMemory(device_budget=60_000, host_budget=400_000), held(0))

    def come_and_go() -> None:
        for seed in range(12):
            decode(memory, seed, 4, 4)

    at_once([come_and_go, come_and_go, *[lambda seed=seed: decode(memory, seed, 50, 4) for seed in (20, 21)]])
    memory.check_integrity()
    memory.close()


def test_a_memory_that_caches_use_is_not_closed() -> None:
    memory = TieredMemory(device_budget=30_000, host_budget=400_000)
    running, done = threading.Event(), threading.Event()

    def run() -> None:
        with TieredKVCache(memory=memory, block_size=4) as cache:
            x = torch.ones(1, 1, 9, 4)
            cache.update(x, x, 0)
            running.set()
            assert done.wait(60)
            assert torch.equal(cache.layers[0].keys.dense(), x)

    def close() -> None:
        assert running.wait(60)
        with pytest.raises(MemoryInUseError, match="not closed: 1"):
            memory.close()
        done.set()

    at_once([run, close])
    memory.close()
    with pytest.raises(ClosedError):
        TieredKVCache(memory=memory)
