"""Parked sequences: caches continue and share them, and they go where room is needed, before anything is refused."""

from __future__ import annotations

import pytest
import torch
from test_interrupts import Line

from kvtier import BudgetError, MismatchError, TieredKVCache, TieredMemory
from kvtier.planning.admission import Claim
from kvtier.stats import Counters
from kvtier.tables.layer import LayerKV
from kvtier.tables.parked.sequence import ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences

HEADS, DIM, SIZE = 1, 8, 4
BLOCK = 2 * HEADS * SIZE * DIM * 4


def kv(tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, HEADS, tokens, DIM)


def cache_on(memory: TieredMemory) -> TieredKVCache:
    return TieredKVCache(memory=memory, block_size=SIZE)


def park(memory: TieredMemory, parked: ParkedSequences, tokens: int) -> tuple[ParkedSequence, torch.Tensor]:
    x = kv(tokens)
    with cache_on(memory) as cache:
        cache.update(x, x, 0)
        return cache._forward.park(parked, 0, tokens), x


def follow(memory: TieredMemory, parked: ParkedSequences, *rows: ParkedSequence, length: int = 10**9) -> TieredKVCache:
    cache = cache_on(memory)
    cache._add_layers(0)
    assert cache._forward.follow(parked, rows, length)
    return cache


def check(memory: TieredMemory, parked: ParkedSequences) -> None:
    memory.check_integrity()
    with memory.lock:
        parked.check_integrity()


def needed(tokens: int) -> int:
    """Bytes of host memory for a first forward."""
    with TieredMemory(host_budget=1) as memory, cache_on(memory) as cache:
        with pytest.raises(BudgetError) as refused:
            cache.update(*[kv(tokens)] * 2, 0)
        assert refused.value.needed is not None
        return refused.value.needed


def test_what_is_parked_goes_before_a_cache_is_refused() -> None:
    memory = TieredMemory(host_budget=needed(10 * SIZE))
    parked = ParkedSequences(memory)
    more = memory.options.host_bytes() // BLOCK - 10  # blocks that are room for reading, and free until then
    gone, _ = park(memory, parked, 4 * SIZE)
    kept, _ = park(memory, parked, 5 * SIZE)
    with cache_on(memory) as cache:
        cache.update(*[kv((3 + more) * SIZE)] * 2, 0)
        assert (gone.length, kept.length) == (2 * SIZE, 5 * SIZE), "the end of the one that was parked first goes first"
        check(memory, parked)
    with cache_on(memory) as cache:
        cache.update(*[kv(10 * SIZE)] * 2, 0)
        check(memory, parked)
        cache.layers[0].keys.dense()
        assert cache.stats.host.used_blocks >= 10
        check(memory, parked)


@pytest.mark.parametrize("missing", [0, 1])
def test_what_a_cache_continues_stays_and_is_claimed(missing: int) -> None:
    memory = TieredMemory(host_budget=5 * BLOCK + needed(6 * SIZE) - missing)
    parked = ParkedSequences(memory)
    sequence, x = park(memory, parked, 5 * SIZE)
    with follow(memory, parked, sequence) as cache, cache_on(memory) as other:
        if missing:
            with pytest.raises(BudgetError) as refused:
                other.update(*[kv(6 * SIZE)] * 2, 0)
            assert refused.value.needed == 5 * BLOCK + needed(6 * SIZE)
            assert other.get_seq_length() == 0
        else:
            other.update(*[kv(6 * SIZE)] * 2, 0)
        check(memory, parked)
        assert torch.equal(cache.layers[0].keys.dense(), x)
        check(memory, parked)


def test_what_several_caches_continue_is_there_once_and_claimed_once() -> None:
    memory = TieredMemory(host_budget=20 * BLOCK)
    parked = ParkedSequences(memory)
    sequence, x = park(memory, parked, 8 * SIZE)
    with follow(memory, parked, sequence) as one, follow(memory, parked, sequence, sequence) as two:
        assert memory.stats.host.used_blocks == 8
        one.update(*[kv(1)] * 2, 0)
        y = kv(1).expand(2, -1, -1, -1)
        two.update(y, y, 0)
        assert memory.stats.host.used_blocks == 11
        with memory.lock:
            assert [claim.held for claim in parked.owner.claims.values()] == [8 * BLOCK]
        assert torch.equal(two.layers[0].keys.dense()[1:, :, : 8 * SIZE], x)
        check(memory, parked)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1])
def test_a_part_of_a_block_is_continued_in_a_copy_that_was_asked_for(length: int, dropped: bool) -> None:
    memory = TieredMemory(host_budget=2 * BLOCK)
    parked = ParkedSequences(memory)
    memory.resize(host_budget=needed(2 * SIZE))
    sequence, x = park(memory, parked, 2 * SIZE)
    held, new = -(-length // SIZE), kv(1)
    memory.resize(host_budget=held * BLOCK)  # what is parked gives way
    with follow(memory, parked, sequence, length=length) as cache:
        if dropped:
            with memory.lock:
                parked.drop(sequence)
        with pytest.raises(BudgetError, match="Nothing was changed") as refused:
            cache.update(new, new, 0)
        assert refused.value.needed is not None
        assert cache.get_seq_length() == length
        memory.resize(host_budget=refused.value.needed - 1)
        with pytest.raises(BudgetError):
            cache.update(new, new, 0)
        memory.resize(host_budget=refused.value.needed)
        cache.update(new, new, 0)
        (claim,) = cache._forward._held.owner.claims.values()
        assert refused.value.needed == (held + 1) * BLOCK + claim.room, "one for the copy, or for the token"
        check(memory, parked)
        assert torch.equal(cache.layers[0].keys.dense(), torch.cat([x[:, :, :length], new], 2))
        check(memory, parked)


def test_a_cache_goes_on_after_it_was_parked_and_what_is_parked_does_not_change() -> None:
    memory = TieredMemory(device_budget=3 * BLOCK, host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    x, more = kv(2 * SIZE + 1), kv(2)
    with cache_on(memory) as cache:
        cache.update(x, x, 0)
        sequence = cache._forward.park(parked, 0, 2 * SIZE + 1)
        cache.update(more, more, 0)
        assert torch.equal(cache.layers[0].keys.dense(), torch.cat([x, more], 2))
        cache.crop(-4)
        cache.update(more, more, 0)
        check(memory, parked)
    with follow(memory, parked, sequence) as cache:
        assert torch.equal(cache.layers[0].values.dense(), x)
    check(memory, parked)


def test_a_cache_that_is_cut_short_as_it_begins_leaves_references_that_are_right() -> None:
    """At any line: one may come while a run is cut for a table that nobody has yet."""
    at, line = 0, Line(0)
    while at == 0 or line.where is not None:
        memory = TieredMemory(host_budget=40 * BLOCK)
        parked = ParkedSequences(memory)
        sequence, x = park(memory, parked, 4 * SIZE)
        cache, line = cache_on(memory), Line(at)
        cache._add_layers(0)
        with line.traced():
            cache._forward.follow(parked, [sequence], 2 * SIZE + 1)
        try:
            check(memory, parked)
            cache.close()
            check(memory, parked)
            with follow(memory, parked, sequence) as other:
                assert torch.equal(other.layers[0].keys.dense(), x)
            check(memory, parked)
        except BaseException as error:
            error.add_note(f"cut short at {line.where}")
            raise
        at += 1
    assert at > 100


def test_blocks_that_nobody_uses_leave_the_device_first() -> None:
    memory = TieredMemory(device_budget=8 * BLOCK, host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    park(memory, parked, 5 * SIZE)
    with cache_on(memory) as cache:
        for _ in range(6):
            cache.update(*[kv(SIZE)] * 2, 0)
        assert cache.residency().layers[0].device_blocks == 6
        check(memory, parked)


def test_what_a_cache_has_parked_is_claimed_as_long_as_it_goes_on() -> None:
    memory = TieredMemory(host_budget=10 * BLOCK)
    parked = ParkedSequences(memory)
    with cache_on(memory) as cache, cache_on(memory) as other:
        x = kv(6 * SIZE)
        cache.update(x, x, 0)
        cache._forward.park(parked, 0, 6 * SIZE)
        with memory.lock:
            assert [claim.held for claim in parked.owner.claims.values()] == [6 * BLOCK]
        with pytest.raises(BudgetError, match="Nothing was changed"):
            other.update(*[kv(8 * SIZE)] * 2, 0)
        assert torch.equal(cache.layers[0].keys.dense(), x)
        check(memory, parked)


def test_layers_of_another_layout_are_refused() -> None:
    memory = TieredMemory(host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    park(memory, parked, 5)
    with TieredKVCache(memory=memory, block_size=2 * SIZE) as cache:
        cache.update(*[kv(5)] * 2, 0)
        with pytest.raises(MismatchError, match="Layer 0 was parked"):
            cache._forward.park(parked, 0, 5)
        assert cache.get_seq_length() == 5
    check(memory, parked)


def test_layers_on_another_device_continue_nothing() -> None:
    memory = TieredMemory(host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    sequence, _ = park(memory, parked, 5)
    with memory.lock, memory.change:
        owner, layout = memory.enter(memory.new_owner()), parked._layers[0].parked.pools.layout
        other = memory.on(torch.device("cpu", 1))
        layer = LayerKV(0, layout, other, memory.block_set(owner, other, layout, 0), Counters())
        with pytest.raises(MismatchError, match=r"Layer 0 was parked .* on cpu, and is .* on cpu:1 now"):
            parked.follow([sequence], 5, lambda index, found: layer)
        assert not layer.tables
        memory.leave(owner)
        memory.drop_set(owner, other, layer.blocks)
    check(memory, parked)


def test_nothing_is_left_when_all_is_dropped() -> None:
    memory = TieredMemory(device_budget=4 * BLOCK, host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    park(memory, parked, 9 * SIZE)
    with memory.lock:
        parked.close()
    memory.check_integrity()
    assert memory.stats.host.used_blocks == memory.stats.device.used_blocks == 0
    memory.close()


def test_what_an_interrupt_left_counted_wrong_is_counted_again() -> None:
    memory = TieredMemory(host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    sequence, x = park(memory, parked, 9 * SIZE)
    lost, _ = park(memory, parked, 3 * SIZE)
    with follow(memory, parked, sequence) as cache:
        for run in sequence.tables[0].resolve():
            run.refs += 1  # as in the midst of a fork
        for run in lost.tables[0].resolve():
            run.refs -= 1
        memory.recovery.interrupted = True
        check(memory, parked)
        assert torch.equal(cache.layers[0].keys.dense(), x)


def test_whoever_comes_while_it_is_looked_whether_something_fits_alone_finds_all_that_is_claimed() -> None:
    """What an owner continues does not count against it, and is claimed again before others are asked for room."""
    memory = TieredMemory(host_budget=40 * BLOCK)
    parked = ParkedSequences(memory)
    sequence, _ = park(memory, parked, 20 * SIZE)
    cache, seen = follow(memory, parked, sequence), list[object]()
    with memory.lock:
        assert parked.claim() is None
        before = dict(parked.owner.claims)
        ((device, claim),) = before.items()
        assert claim.held == 20 * BLOCK

        def concedes() -> bool:
            seen.append(dict(parked.owner.claims))
            return False

        memory.conceding.append(concedes)
        owner = cache._forward._held.owner
        fits, too_much = (lambda limit, n=n: Claim(held=n * BLOCK) for n in (40, 41))
        assert memory.admit(owner, device, fits, take=False) is None, "it would have all of the memory"
        assert parked.owner.claims == before
        assert memory.admit(owner, device, too_much, take=False) is not None
        assert memory.admit(owner, device, fits) is not None, "what it continues, and so much besides"
        assert parked.owner.claims == before
        assert seen == [before, before]
        memory.conceding.remove(concedes)
    cache.close()
    check(memory, parked)
