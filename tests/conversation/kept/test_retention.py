"""Whichever policy says what goes, tokens are right, what it knows is what is kept, and its choice is what goes."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from families import tiny_model
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import ConfigError
from kvtier.conversation.index import packed
from kvtier.conversation.kept import retention
from kvtier.conversation.kept.retention import Retention
from kvtier.eviction.policies.adaptive import SHADOW_BLOCKS, Adaptive
from kvtier.eviction.policies.lru import LRU
from kvtier.eviction.policies.names import CANDIDATES, FIXED, POLICIES, adaptive
from kvtier.eviction.policies.pensieve import Pensieve
from kvtier.eviction.rank import Rank


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "TOKENS", 8)


# Alone, against sequences in lists


class Model:
    """Sequences, and the blocks that they have: what must be known of them."""

    def __init__(self) -> None:
        self.sequences: dict[int, tuple[Hashable, list[int]]] = {}
        self.held: set[int] = set()
        self.ranks: dict[int, tuple[Hashable, list[int], Rank]] = {}

    def pinned(self, number: int) -> bool:
        """Whether somebody has pinned a sequence's last block, since that was kept last."""
        key, ids = self.sequences[number]
        return any(
            r.pinned and key == k and theirs[: len(ids)] == ids and (len(ids) == len(theirs) or len(ids) % 8 == 0)
            for k, theirs, r in self.ranks.values()
        )

    def is_kept(self, key: Hashable, ids: list[int]) -> bool:
        """Whether any sequence has a block that ends with these."""
        return any(
            theirs == key and more[: len(ids)] == ids and (len(more) == len(ids) or len(ids) % 8 == 0)
            for theirs, more in self.sequences.values()
        )

    def forget(self) -> None:
        """Blocks that nobody keeps lose their rank, with all that is behind them."""
        for user, (key, ids, rank) in list(self.ranks.items()):
            while ids and not self.is_kept(key, ids):
                ids = ids[: (len(ids) - 1) // 8 * 8]
            self.ranks[user] = key, ids, rank

    def is_end(self, number: int) -> bool:
        """Whether nobody else needs a sequence's last block as the middle of its own."""
        key, ids = self.sequences[number]
        last = (len(ids) - 1) // 8 * 8
        for other, (theirs, more) in self.sequences.items():
            if other != number and theirs == key and more[: len(ids)] == ids and len(more) > len(ids) == last + 8:
                return False
        return True


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_the_policy_knows_what_is_kept_and_its_victims_are_ends(name: str, seed: int) -> None:
    draw, model, now = random.Random(seed), Model(), [0.0]
    order: Retention[int] = Retention(POLICIES[name](), 64, lambda: now[0])
    for number in range(300):
        now[0] += draw.random()
        what = draw.choice(
            ("keep", "keep", "use", "hold", "release", "evict", "shorten", "drop", "full", "rank", "rank")
        )
        some = draw.choice(list(model.sequences)) if model.sequences else None
        if what == "keep":
            ids = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
            if some is not None and draw.random() < 0.7:
                ids = model.sequences[some][1][: draw.randrange(1, 60)] + ids
            key = draw.choice(("a", "b"))
            model.sequences[number] = key, ids
            order.keep(number, key, packed(ids))
        elif what == "full":
            order.full()
        elif what == "evict":
            for sequence, tokens in order.evict():
                key, ids = model.sequences[sequence]
                assert sequence not in model.held
                assert not model.pinned(sequence)
                assert model.is_end(sequence)
                assert tokens == (len(ids) - 1) // 8 * 8
                if tokens:
                    model.sequences[sequence] = key, ids[:tokens]
                else:
                    del model.sequences[sequence]
                order.shortened(sequence, tokens)
        elif some is not None and what == "use":
            order.use([some], draw.randrange(1, 80))
        elif some is not None and what == "rank":
            user, tokens, rank = (
                draw.randrange(6),
                draw.randrange(1, 50),
                Rank(draw.random() < 0.3, draw.randrange(3), draw.choice((5.0, math.inf))),
            )
            if rank.pinned or draw.random() < 0.7:
                key, ids = model.sequences[some]
                model.ranks[user] = key, ids[: -(-tokens // 8) * 8], rank
                order.rank(user, some, tokens, rank)
            else:
                model.ranks.pop(user, None)
                order.unrank(user)
        elif some is not None and what == "hold":
            model.held.add(some)
            order.hold(some)
        elif some is not None and what == "release":
            model.held.discard(some)
            order.release(some)
        elif some is not None and what in ("shorten", "drop"):
            key, ids = model.sequences.pop(some)
            tokens = draw.randrange(len(ids)) // 8 * 8 if what == "shorten" else 0
            if tokens:
                model.sequences[some] = key, ids[:tokens]
            else:
                model.held.discard(some)
            order.shortened(some, tokens)
        model.forget()
        order.check_integrity(model.sequences)
    for user in range(6):
        order.unrank(user)
    for sequence in model.held:
        order.release(sequence)
    while gone := order.evict():
        for sequence, tokens in gone:
            order.shortened(sequence, tokens)
    order.check_integrity(())


def test_the_least_recently_used_goes_first_its_end_first() -> None:
    now = [0.0]
    order: Retention[str] = Retention(LRU(), 1000, lambda: now[0])
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        now[0] += 1
        order.keep(name, "", packed([first] * 20))
    now[0] += 1
    order.use(["a"], 20)
    gone = []
    while chosen := order.evict():
        gone += chosen
        for name, tokens in chosen:
            order.shortened(name, tokens)
    assert gone == [("b", 16), ("b", 8), ("b", 0), ("c", 16), ("c", 8), ("c", 0), ("a", 16), ("a", 8), ("a", 0)]


# What the default's shadows see


class Loop:
    """Sequences that are kept in a memory of so many blocks, and used again while they are."""

    def __init__(self, policy: Adaptive, blocks: int) -> None:
        self.policy, self.room, self.now = policy, blocks * retention.TOKENS, 0.0
        self.order: Retention[Hashable] = Retention(policy, 256 * retention.TOKENS, lambda: self.now)
        self.kept: set[Hashable] = set()
        self.used: dict[Hashable, int] = {}

    def visit(self, sequence: Hashable, ids: list[int]) -> bool:
        """Whether it is there still."""
        self.now += 1
        if self.used.get(sequence) == len(ids):
            self.order.use([sequence], len(ids))
            return True
        while sum(self.used.values()) + len(ids) > self.room:
            self.order.full()
            for gone, tokens in self.order.evict():
                self.order.shortened(gone, tokens)
                self.used[gone] = tokens
                if not tokens:
                    del self.used[gone]
        if self.used.pop(sequence, 0):
            self.order.shortened(sequence, 0)
        self.order.keep(sequence, "", packed(ids))
        self.used[sequence] = len(ids)
        return False


@pytest.mark.parametrize("first", [1, 3, 256])
def test_the_best_policy_is_found_however_short_the_first_sequence_is(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A loop somewhat larger than the memory, in which what was used longest ago is what is needed next."""
    monkeypatch.setattr(retention, "TOKENS", 256)

    def hits(policy: Adaptive) -> int:
        loop = Loop(policy, 60)
        loop.visit("first", [-1] * first)
        return sum(loop.visit(i, [i] * 256) for _ in range(60) for i in range(80))

    policy = adaptive()
    found = hits(policy)
    assert (policy.rate, policy.leader) == (1, "s3-fifo")
    assert found >= 0.7 * max(hits(Adaptive({name: FIXED[name]})) for name in CANDIDATES)
    assert found > 1500


def test_shadows_of_a_large_memory_hold_a_sample() -> None:
    policy = adaptive()
    loop = Loop(policy, 6000)
    for i in range(9000):
        loop.visit(i, [i] * 8)
        assert all(len(shadow.tree) < 2 * SHADOW_BLOCKS for shadow in policy._shadows.values())
    assert policy.rate == 1 / 4
    for shadow in policy._shadows.values():
        assert len(shadow.tree) == pytest.approx(6000 / 4, rel=0.1)
        shadow.tree.check_integrity()


def test_once_the_memory_was_full_the_capacity_is_what_is_kept() -> None:
    policy = adaptive()
    loop = Loop(policy, 60)
    for i in range(40):
        loop.visit(i, [i] * 80)
        if i >= 6:
            assert policy.capacity == 60 * 8
            assert all(shadow.tree.capacity == 60 * 8 for shadow in policy._shadows.values())
            assert policy._period == 60, "hits count half after 32 times what a shadow holds"


def test_what_a_longer_sequence_replaces_leaves_the_shadows() -> None:
    policy = adaptive()
    order: Retention[tuple[int, int]] = Retention(policy, 256 * 8)
    for turn in range(20):
        for chat in range(30):
            before, after = (chat, turn - 1), (chat, turn)
            if turn:
                order.use([before], 3 * turn)
            order.keep(after, "", packed([chat] * 3 * (turn + 1)))
            if turn:
                order.shortened(before, 0)
    assert policy.rate == 1
    for shadow in policy._shadows.values():
        assert len(shadow.tree) == 30 * -(-60 // 8)
        shadow.tree.check_integrity()
        assert shadow.tree.used == 30 * 60


# In a store

#: Host memory that holds two or three conversations of five.
BUDGETS = {"llama": "56KiB", "gemma3": "40KiB", "qwen3_next": "40KiB"}


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_goes_first_tokens_are_right(policy: str, name: str) -> None:
    model, draw = tiny_model(name), random.Random(len(policy))
    with store_of(model, eviction=policy, host_budget=BUDGETS[name]) as store:
        chats = [some_ids(draw.randrange(8, 40), seed=i) for i in range(5)]
        for _ in range(16):
            i = draw.randrange(5)
            inputs = ones(grown(chats[i], draw.randrange(1, 6)))
            if inputs["input_ids"].shape[1] > 56:
                inputs = ones(some_ids(20, seed=100 + i))
            out = store.generate(**inputs, **GREEDY)
            assert torch.equal(out, fresh(model, inputs))
            chats[i] = out
            store.check_integrity()
        assert store.stats.dropped


def test_what_was_used_again_outlives_what_was_not() -> None:
    model = tiny_model("llama")
    system = some_ids(32, seed=9)
    with store_of(model, eviction="lru", host_budget="128KiB") as store:
        for i in range(40):
            ids = ones(torch.cat([system, some_ids(24, seed=i)], 1))
            assert torch.equal(store.generate(**ids, **GREEDY), fresh(model, ids))
            if i:
                assert store.reuse[0].cached >= 32, "all begin with it"
        assert store.stats.dropped > 10


def test_policies_that_are_none_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="'newest'"):
        store_of(model, eviction="newest")
    with pytest.raises(ConfigError):
        store_of(model, eviction=Pensieve)
    options: dict[str, Any] = {"eviction": Pensieve()}
    store_of(model, **options).close()
