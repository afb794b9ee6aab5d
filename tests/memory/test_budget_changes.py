"""Budgets of a memory in use are raised and lowered; what does not fit is refused with the budget that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvtier import BudgetError, ClosedError, ConfigError, Policy, TieredKVCache, TieredMemory, TransferError
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.fetching import Fetching
from kvtier.testing import throttled, with_doubles

LAYERS, HEADS, DIM, BLOCK_SIZE = 2, 2, 8, 4
BLOCK = BLOCK_SIZE * 2 * HEADS * DIM * 4


def new_tokens(tokens: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 1, HEADS, tokens, DIM, generator=rng) for _ in range(LAYERS)]


class Driven:
    """A cache and what it should hold."""

    def __init__(self, **options: Any) -> None:
        self.cache = TieredKVCache(block_size=BLOCK_SIZE, **options)
        self.held = [torch.zeros(2, 1, HEADS, 0, DIM) for _ in range(LAYERS)]

    def step(self, tokens: int, seed: int = 0) -> None:
        new = new_tokens(tokens, seed)
        for i in range(LAYERS):
            keys, values = self.cache.update(*new[i], i)
            F.scaled_dot_product_attention(torch.ones(1, HEADS, 1, DIM), keys, values)
        self.held = [torch.cat([a, b], 3) for a, b in zip(self.held, new, strict=True)]

    def check(self) -> None:
        """Every byte is there, within the budgets."""
        self.cache.check_integrity()
        for i, (keys, values) in enumerate(self.held):
            assert torch.equal(self.cache.layers[i].keys.dense(), keys)
            assert torch.equal(self.cache.layers[i].values.dense(), values)
        stats = self.cache.stats
        assert stats.device.bytes <= stats.device.budget
        assert stats.host.bytes <= stats.host.budget


def refused(act: Callable[[], Any]) -> BudgetError | None:
    """The error of a refusal."""
    try:
        act()
    except BudgetError as error:
        return error
    return None


def state(cache: TieredKVCache) -> tuple[Any, ...]:
    stats = cache.stats
    return stats.device, stats.host, cache.residency()


@pytest.mark.parametrize("host_attention", [True, False])
def test_after_its_budget_is_raised_a_refused_step_goes_through(host_attention: bool) -> None:
    driven = Driven(device_budget=6 * BLOCK, host_budget=20 * BLOCK, host_attention=host_attention)
    driven.step(8)
    while (error := refused(lambda: driven.step(30, seed=1))) is not None:
        assert driven.cache.get_seq_length() == 8
        driven.check()
        driven.cache.resize(**{f"{error.tier}_budget": error.needed})
        assert getattr(driven.cache.stats, error.tier).budget == error.needed
    assert driven.cache.get_seq_length() == 38
    driven.check()


@pytest.mark.parametrize("host_attention", [True, False])
def test_a_lower_device_budget_moves_blocks_to_the_host_and_is_never_exceeded_again(host_attention: bool) -> None:
    driven = Driven(device_budget=200 * BLOCK, host_budget=200 * BLOCK, host_attention=host_attention)
    driven.step(90)
    assert driven.cache.stats.evictions == 0
    driven.cache.resize(device_budget=40 * BLOCK)
    assert driven.cache.stats.device.budget == 40 * BLOCK
    assert driven.cache.stats.device.bytes <= 40 * BLOCK
    assert driven.cache.stats.evictions > 0
    driven.check()
    for n in range(10):
        driven.step(1, n)
        assert driven.cache.stats.device.bytes <= 40 * BLOCK
    driven.check()
    driven.cache.resize(device_budget=200 * BLOCK)
    driven.step(100, 3)
    driven.check()


@pytest.mark.parametrize("options", [{}, {"device_budget": 60 * BLOCK}, {"device_budget": 200 * BLOCK}], ids=str)
@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_does_not_fit_is_refused_with_a_budget_that_fits_and_nothing_changes(
    tier: str, options: dict[str, Any]
) -> None:
    if tier == "device" and not options:
        pytest.skip("there is none")
    driven = Driven(host_budget=200 * BLOCK, **options)
    driven.step(90)
    driven.step(1, 1)
    before, budget = state(driven.cache), 1
    for _ in range(9):
        error = refused(lambda budget=budget: driven.cache.resize(**{f"{tier}_budget": budget}))
        if error is None or error.tier != tier:  # the other tier is full by now: that is the end of it
            break
        assert (error.budget, state(driven.cache)) == (budget, before)
        driven.check()
        assert refused(lambda error=error: driven.cache.resize(**{f"{tier}_budget": error.needed - 1})) is not None
        assert state(driven.cache) == before
        budget = error.needed
    else:
        raise AssertionError("the errors lead nowhere")
    driven.check()
    driven.cache.resize(host_budget=400 * BLOCK, **options)
    driven.step(1, 2)
    driven.check()


def test_both_budgets_change_together_where_one_alone_could_not() -> None:
    driven = Driven(device_budget=60 * BLOCK, host_budget=4 * BLOCK)
    driven.step(90)
    with pytest.raises(BudgetError):
        driven.cache.resize(device_budget=20 * BLOCK)
    driven.check()
    driven.cache.resize(device_budget=20 * BLOCK, host_budget=60 * BLOCK)
    driven.check()
    driven.cache.resize(device_budget=60 * BLOCK, host_budget=4 * BLOCK)
    driven.check()


@pytest.mark.parametrize(("falls", "moved"), [("host", 0), ("host", 1), ("host", 5), ("device", 0), ("device", 1)])
def test_where_a_block_cannot_move_what_has_moved_goes_back_and_no_budget_is_exceeded(
    falls: str, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = {"device_budget": 30 * BLOCK, "host_budget": 60 * BLOCK}
    on_device = {"device_budget": 60 * BLOCK, "host_budget": 4 * BLOCK}
    before, after = (on_host, on_device) if falls == "host" else (on_device, on_host)
    driven = Driven(**before)
    driven.step(90)
    budgets = driven.cache.stats.device.budget, driven.cache.stats.host.budget
    left, owner, name = moved, *((Fetching, "promote") if falls == "host" else (Eviction, "evict_from"))
    move = getattr(owner, name)

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            raise TransferError("a block is not copied")
        return move(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(TransferError, match="is not copied"):
        driven.cache.resize(**after)
    assert (driven.cache.stats.device.budget, driven.cache.stats.host.budget) == budgets
    driven.check()
    driven.cache.resize(**after)
    driven.check()


@pytest.mark.parametrize("error", [TransferError, KeyboardInterrupt])
def test_what_cannot_go_back_has_a_budget_that_holds_it_and_the_error_says_so(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(device_budget=30 * BLOCK, host_budget=60 * BLOCK)
    driven.step(90)
    left, move = 2, Fetching.promote

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise error("a block is not copied")
        return move(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Fetching, "promote", fails)
        if error is TransferError:
            patch.setattr(Eviction, "evict_from", fails)
        with pytest.raises(error) as caught:
            driven.cache.resize(device_budget=60 * BLOCK, host_budget=4 * BLOCK)
    stats = driven.cache.stats
    assert stats.device.bytes <= stats.device.budget <= 60 * BLOCK
    assert stats.device.budget > 30 * BLOCK, "nothing has moved"
    assert f"The device budget is {stats.device.budget} bytes now" in caught.value.__notes__[0]
    if error is TransferError:
        driven.check()
        driven.cache.resize(device_budget=30 * BLOCK, host_budget=60 * BLOCK)
        driven.check()


def test_room_that_is_not_to_be_had_is_refused_and_blocks_do_not_go_up_and_down_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both tiers are full: what an accelerator without memory asks for, whose budget shrinks, is nowhere."""
    driven = Driven(device_budget=60 * BLOCK, host_budget=4 * BLOCK)
    driven.step(112)
    promoted: list[object] = []
    promote = ComputeDevice.promote

    def counted(device: ComputeDevice, layout: BlockLayout | None) -> bool:
        promoted.append(layout)
        assert len(promoted) < 1000, "this would not end"
        return promote(device, layout)

    monkeypatch.setattr(ComputeDevice, "promote", counted)
    memory = driven.cache._forward.memory
    with memory.lock, pytest.raises(BudgetError):
        memory.devices[0].make_room(10 * BLOCK)
    driven.check()


def test_blocks_come_back_to_where_a_workspace_is_larger_than_it_has_to_be() -> None:
    memory = TieredMemory(device_budget=60 * BLOCK, host_budget=200 * BLOCK)
    dense, other = Driven(memory=memory, host_attention=False), Driven(memory=memory)
    other.step(200)
    other.step(1)
    dense.step(40)
    dense.step(1)  # laid out as a whole
    dense.cache.crop(-20)
    dense.held = [x[:, :, :, :21] for x in dense.held]
    dense.step(1)  # and from now on half of it
    error = refused(lambda: memory.resize(host_budget=1))
    assert error is not None
    memory.resize(host_budget=error.needed)
    for each in (dense, other):
        each.check()


def test_before_the_first_forward_and_after_reset_the_new_budgets_are_those_that_count() -> None:
    driven = Driven(device_budget=1, host_budget=1)
    driven.cache.resize(device_budget=50 * BLOCK, host_budget=51 * BLOCK)
    for _ in range(2):
        stats = driven.cache.stats
        assert (stats.device.budget, stats.host.budget) == (50 * BLOCK, 51 * BLOCK)
        driven.step(90)
        driven.cache.reset()


def test_a_budget_that_cannot_change_is_refused() -> None:
    driven = Driven(host_budget=200 * BLOCK)
    driven.step(9)
    with pytest.raises(ConfigError, match="emulate"):
        driven.cache.resize(device_budget=50 * BLOCK)
    with pytest.raises(ConfigError, match="host_budget"):
        driven.cache.resize(host_budget="lots")
    assert driven.cache.stats.host.budget == 200 * BLOCK
    emulated = Driven(device_budget=50 * BLOCK)
    emulated.step(9)
    with pytest.raises(ConfigError, match="emulate"):
        emulated.cache.resize(device_budget={"cuda": "1GiB"})
    driven.cache.close()
    with pytest.raises(ClosedError):
        driven.cache.resize(host_budget=1)


def test_a_cache_on_a_shared_memory_leaves_its_budgets_to_the_memory() -> None:
    memory = TieredMemory(device_budget=50 * BLOCK, host_budget=200 * BLOCK)
    first, second = Driven(memory=memory), Driven(memory=memory)
    first.step(30)
    second.step(30)
    with pytest.raises(ConfigError, match=r"memory\.resize"):
        first.cache.resize(host_budget=100 * BLOCK)
    memory.resize(device_budget=30 * BLOCK, host_budget=100 * BLOCK)
    for driven in (first, second):
        driven.step(1, 1)
        driven.check()
    error = refused(lambda: memory.resize(device_budget=4 * BLOCK, host_budget=4 * BLOCK))
    assert error is not None
    memory.resize(**{f"{error.tier}_budget": error.needed})
    for driven in (first, second):
        driven.check()


@pytest.mark.parametrize("through", [0.0, 1.0], ids=["copies under way", "none"])
def test_copies_that_are_under_way_refuse_no_budget(through: float) -> None:
    """All blocks have room on the device: the host is needed for nothing, whatever is on its way there."""
    cache = with_doubles(
        TieredKVCache(
            block_size=BLOCK_SIZE, device_budget="64KiB", host_budget="64KiB", policy=Policy(write_through=through)
        ),
        throttled(up=1e5, latency=0.1),
    )
    keys = torch.randn(1, HEADS, 200, DIM)
    cache.update(keys, keys, 0)
    if not through:
        assert cache.stats.host.bytes
    cache.resize(host_budget=1)
    assert cache.stats.host.bytes <= 1
    assert torch.equal(cache.layers[0].keys.dense(), keys)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("blocks", [3, 5, 10])
def test_what_a_resize_names_suffices_where_room_is_scattered_over_layouts(blocks: int) -> None:
    """Blocks of one layout have to go up, and what is free there is within slabs of another one."""
    small, large = 4, 64  # head dimensions
    memory = TieredMemory(device_budget="14KiB", host_budget=10**6)
    caches = [TieredKVCache(memory=memory, block_size=BLOCK_SIZE) for _ in range(2)]
    held = []
    for cache, dim, tokens, device in (
        (caches[0], small, 400, 2048),
        (caches[1], large, BLOCK_SIZE * blocks, 2048 * blocks),
    ):
        keys = torch.randn(1, 1, tokens, dim)
        if dim == large:
            memory.resize(device_budget=device)
        cache.update(keys, keys, 0)
        if dim == small:
            memory.resize(device_budget=device)
        held.append(keys)
    kept = BLOCK_SIZE * max(blocks - 7, 1)
    caches[1].crop(kept - BLOCK_SIZE * blocks)
    held[1] = held[1][:, :, :kept]
    error = refused(lambda: memory.resize(host_budget=1))
    if error is not None:
        assert error.budget == 1
        memory.resize(host_budget=error.needed)
    memory.check_integrity()
    for cache, keys in zip(caches, held, strict=True):
        assert torch.equal(cache.layers[0].keys.dense(), keys)
