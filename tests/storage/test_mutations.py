"""The walk finds what it is for: each of these deliberate breakages makes it fail within a few seeds.

A test here that fails means that the walk went blind, not that the cache is wrong.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_random_walk import Walk

from kvtier import TieredKVCache
from kvtier.runtime import EngineFactory
from kvtier.storage.block import Table
from kvtier.storage.gather import dense_kv
from kvtier.storage.pool import BlockPool
from kvtier.storage.staging import StagingArea
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import Transfer, TransferEngine
from kvtier.testing import failing, held

Patch = pytest.MonkeyPatch
STEPS, SEEDS = 80, 12


def rewritten(owner: type, name: str, old: str, new: str) -> Callable[..., Any]:
    """The method `name` of `owner` with `old` replaced by `new` in its source, which must contain it."""
    function = owner.__dict__[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{owner.__name__}.{name} no longer contains {old!r}: renew this mutation"
    names: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<mutated {name}>", "exec")
    exec(code, function.__globals__, names)
    return names[name]


def edit(owner: type, name: str, old: str, new: str) -> Callable[[Patch], None]:
    """A mutation by rewriting one method."""

    def apply(patch: Patch) -> None:
        patch.setattr(owner, name, rewritten(owner, name, old, new))

    return apply


def transfers_take_no_references(patch: Patch) -> None:
    """Both halves go, so that counts still balance and only the protection is missing."""
    patch.setattr(TransferEngine, "submit", rewritten(TransferEngine, "submit", "copy.retain()", "pass"))
    patch.setattr(Transfer, "settle", rewritten(Transfer, "settle", "copy.release()", "pass"))
    patch.setattr(TransferEngine, "pending_slots", lambda self, pool: 0)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    # waits
    "wait_does_nothing": lambda patch: patch.setattr(Transfer, "wait", lambda self: None),
    "synchronize_does_nothing": lambda patch: patch.setattr(Transfer, "synchronize", lambda self: None),
    "evict_waits_for_no_pending_copy": edit(Tiers, "evict", "block.pending is not None", "False"),
    # references
    "transfers_take_no_references": transfers_take_no_references,
    "settle_keeps_its_references": edit(Transfer, "settle", "copy.release()", "pass"),
    "fork_counts_no_references": edit(Table, "fork", "block.refs += 1", "pass"),
    "trim_forgets_references": edit(LayerStore, "_trim", "self._unref(block)", "pass"),
    "drop_forgets_references": edit(LayerStore, "_drop", "self._unref(block)", "pass"),
    "a_free_block_keeps_its_far_slot": edit(Tiers, "free_block", "far.release(block.far)", "pass"),
    "release_ignores_other_references": lambda patch: patch.setattr(
        BlockPool, "retain", lambda self, slot: self._refs.__setitem__(slot, 1)
    ),
    # copy on write
    "open_tail_does_not_copy_a_shared_tail": edit(LayerStore, "_open_tail", "if block.refs > 1:", "if False:"),
    "an_opened_tail_keeps_its_far_copy": edit(LayerStore, "_open_tail", "if block.far is not None:", "if False:"),
    "an_opened_tail_stays_resident": edit(LayerStore, "_open_tail", "self.resident.pop(block, None)", "pass"),
    "a_copied_tail_keeps_its_reference": edit(LayerStore, "_open_tail", "block.refs -= 1", "pass"),
    # what readers remember
    "evict_changes_no_version": edit(Tiers, "evict", "block.layer.block_moved(block)", "pass"),
    "trim_keeps_the_open_tails": edit(LayerStore, "_trim", "self._tails = None", "pass"),
    # failures
    "failed_fetches_are_kept": edit(StagingArea, "finish", "staging.arrives()", "True"),
    "a_failed_write_back_counts_as_written": edit(
        Tiers, "write_back", "if transfer.state is State.FAILED:\n", "if transfer.state is None:\n"
    ),
    "evict_forgets_to_ask_whether_the_copy_failed": edit(Tiers, "write_back", "transfer.wait()", "pass"),
    "a_failed_append_leaves_its_blocks": edit(LayerStore, "append", "self._trim(self.length)", "pass"),
}

WALKS: tuple[dict[str, Any], ...] = (
    {"engine": lambda seed: held(seed, 0.1), "budgets": (20_000, 40_000)},
    {"engine": lambda seed: failing(0.3, seed), "budgets": (20_000, 40_000)},
)


def caught() -> Exception | None:
    """What the first walk that fails fails with."""
    for seed in range(SEEDS):
        for options in WALKS:
            engine: EngineFactory = options["engine"](seed)
            walk = Walk(900 + seed, engine=engine, budgets=options["budgets"], host=60_000)
            try:
                for _ in range(STEPS):
                    walk.step()
            except Exception as error:
                return error
    return None


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_cache_makes_the_walk_fail(mutation: str, monkeypatch: Patch) -> None:
    MUTATIONS[mutation](monkeypatch)
    assert caught() is not None


def refilled_tail() -> bool:
    """Crop into a spilled block, prefetch it, refill it, spill it again: does the cache hold the new tokens?"""
    cache = TieredKVCache(device_budget=10**6, host_budget=10**6, block_size=4)
    old, new = torch.zeros(1, 1, 8, 4), torch.ones(1, 1, 2, 4)
    cache.update(old, old, 0)
    store = cache._runtime.layers[0]
    store.tiers.evict(next(reversed(store.resident)))
    cache.crop(-2)
    store.tiers.staging.prefetch(store)
    cache.update(new, new, 0)
    store.tiers.evict(next(reversed(store.resident)))
    return torch.equal(dense_kv(store, 8)[0], torch.cat([old[:, :, :6], new], 2))


def test_what_was_prefetched_of_a_block_that_is_written_again_must_be_dropped(monkeypatch: Patch) -> None:
    assert refilled_tail()
    edit(LayerStore, "_open_tail", "self.tiers.staging.drop(self)", "pass")(monkeypatch)
    assert not refilled_tail()
