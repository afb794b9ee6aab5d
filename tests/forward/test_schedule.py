"""What a policy is told of a layer is what the layer holds, though a schedule looks only at those that have changed."""

from __future__ import annotations

import itertools

import torch

from kvtier import Policy, TieredKVCache, TieredMemory
from kvtier.config import CacheOptions
from kvtier.forward.packed import PackedForward, PackedSequence
from kvtier.planning.step import LayerState, StepPlan, StepState

LAYERS, HEADS, BLOCK, DIM = 3, 2, 4, 4
#: Bytes of a block of keys and values.
SLOT = 2 * HEADS * BLOCK * DIM * 4


class Told(Policy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[StepState] = []

    def plan(self, state: StepState) -> StepPlan:
        """As `Policy`."""
        self.states.append(state)
        return super().plan(state)


def cache_of(policy: Policy, tokens: int = 12 * BLOCK) -> TieredKVCache:
    """Most of its blocks are on the host."""
    cache = TieredKVCache(device_budget=2 * LAYERS * 4 * SLOT, host_budget=1 << 20, block_size=BLOCK, policy=policy)
    step(cache, tokens)
    assert next(iter(cache._forward.memory.devices)).spilled
    return cache


def step(cache: TieredKVCache, tokens: int = 1, rows: int = 1) -> None:
    """New tokens in all layers, and all is read."""
    for layer in range(LAYERS):
        x = torch.randn(rows, HEADS, tokens, DIM)
        cache.update(x, x, layer)


def tables(states: list[StepState]) -> list[int]:
    """Distinct sequences of each layer."""
    return [layer.sequences for layer in states[0].layers]


def test_a_policy_hears_of_rows_that_share_all_again() -> None:
    cache = cache_of(Policy())
    cache.batch_repeat_interleave(2)
    step(cache, 1, rows=2)
    assert tables(cache._forward.states()) == [2] * LAYERS
    cache.crop(-1)  # what is left is shared by both, and has no other blocks
    assert tables(cache._forward.states()) == [2] * LAYERS
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.check_integrity()
    assert tables(cache._forward.states()) == [1] * LAYERS


def test_what_a_policy_keeps_does_not_change_behind_its_back() -> None:
    policy = Told()
    cache = cache_of(policy)
    for _ in range(3 * BLOCK):
        step(cache)
    first, copies = policy.states[0], [list[LayerState](each.layers) for each in policy.states]
    seen = [[(x.resident, x.spilled) for x in each] for each in copies]
    for _ in range(3 * BLOCK):
        step(cache)
    assert [[(x.resident, x.spilled) for x in each.layers] for each in policy.states[: len(seen)]] == seen
    assert first.layers != policy.states[-1].layers


def test_a_state_is_that_of_a_schedule_that_looks_at_everything() -> None:
    cache = cache_of(Policy())
    for count in range(3 * BLOCK):
        step(cache)
        told = cache._forward.states()
        schedules = cache._forward._schedules
        assert schedules
        kept = dict(schedules)
        schedules.clear()  # the next one looks at every layer
        assert cache._forward.states() == told, count
        schedules.update(kept)
        for schedule in schedules.values():  # the layers tell it again
            for reader in schedule.readers:
                reader.layer.blocks.stale = schedule._stale


def test_a_policy_hears_of_sequences_that_come_and_go_with_blocks_of_others() -> None:
    memory = TieredMemory(device_budget=2 * LAYERS * 4 * SLOT, host_budget=1 << 20)
    forward = PackedForward(memory, CacheOptions(block_size=BLOCK), LAYERS)
    sequence = forward.add()

    def packed_step(*sequences: PackedSequence, tokens: int) -> None:
        (batch,) = forward.begin([(each, tokens) for each in sequences])
        for layer in range(LAYERS):
            x = torch.randn(1, HEADS, tokens * len(sequences), DIM)
            batch.append(layer, x, x)
        forward.end()
        forward.check_integrity()

    packed_step(sequence, tokens=12 * BLOCK)
    packed_step(sequence, tokens=BLOCK)
    assert forward._schedules
    assert tables(forward.states()) == [1] * LAYERS
    second = forward.fork(sequence)
    forward.check_integrity()
    assert tables(forward.states()) == [2] * LAYERS
    forward.remove(second)
    forward.check_integrity()
    assert tables(forward.states()) == [1] * LAYERS
    forward.close()
    memory.close()


def test_a_policy_hears_of_what_each_reader_of_a_layer_has_fetched_until_that_one_lets_go_of_it() -> None:
    """A long prompt of an engine is read by a reader of its own; two of them may take turns."""
    memory = TieredMemory(device_budget=2 * LAYERS * 8 * SLOT, host_budget=1 << 20)
    forward = PackedForward(memory, CacheOptions(block_size=BLOCK), LAYERS)
    batch = [(forward.add(), 16 * BLOCK) for _ in range(2)]
    (part,) = forward.begin(batch)
    for layer in range(LAYERS):
        x = torch.randn(1, HEADS, 32 * BLOCK, DIM)
        part.append(layer, x, x)
    shared = forward.readers[0]
    readers, blocks = [part._reader_of(shared, row) for row in range(2)], shared.layer.blocks
    most = 0

    def check() -> int:
        assert blocks.transient == sum(run.count for each in (shared, *readers) for run in each.fetched)
        return blocks.transient

    for _ in itertools.zip_longest(*(each.portions(0, 16, 1) for each in readers)):
        most = max(most, check())
    assert most > 1, "both have fetched something"
    assert check() == 0
    forward.end()
    forward.close()
    memory.close()
