"""Several tiers in virtual time: what copies ahead promise, and that nothing is counted twice."""

from __future__ import annotations

import math
import random

import pytest

from kvtier import ConfigError
from kvtier.eviction.policies.lru import LRU
from kvtier.eviction.policies.names import POLICIES
from kvtier.eviction.replay.tiers import Level, Machine, Replayed, Tier, _Replay, replay_tiers
from kvtier.eviction.replay.traces import Request

BLOCK = 100


def prefill(new: int, past: int) -> float:
    return 0.01 + new * 1e-3 + new * past * 1e-6


def machine(*blocks: int, rate: float = 1000.0, **options) -> Machine:
    """Tiers of so many blocks; a block takes 0.1 s over a link of 1000 bytes per second."""
    tiers = tuple(Tier(f"tier {i}", n, rate, rate) for i, n in enumerate(blocks))
    return Machine(tiers, BLOCK, prefill, 0.01, **options)


def conversations(count: int, turns: int, pause: float, seed: int = 0) -> list[Request]:
    """Conversations that take turns, each two blocks of 100 tokens longer than the one before."""
    draw = random.Random(seed)
    found = []
    for turn in range(turns):
        for i in draw.sample(range(count), count):
            keys = tuple((i, j) for j in range(2 * turn + 2))
            found.append(Request(len(found) * pause, keys, 100 * len(keys), 10, 100))
    return found


class Checked(_Replay):
    """Looks at every tier after every request."""

    def request(self, number: int, request: Request) -> None:
        super().request(number, request)
        for level, below in zip(self.levels, [*self.levels[1:], None], strict=True):
            check(level, below)


def check(level: Level, below: Level | None) -> None:
    level.tree.check_integrity()
    level.bare.check_integrity()
    assert level.tree.used <= level.tier.blocks
    moving = {level._moving} - {None}
    without = {key for key in level.tree if below is not None and key not in below.tree} - moving
    assert set(level.bare) == without, "what has no copy below"
    if below is not None:
        assert level.shut == shut(level, without | moving), "what eviction cannot come to for nothing"
        assert level.room == level.tree.free + len(level.tree) - len(level.shut)


def shut(level: Level, without: set) -> set:
    """Blocks in use or without a copy, and all that such blocks continue, as far as it is here."""
    found = set()
    for key in level.tree:
        node = level.tree.node(key)
        if node.users or key in without:
            while node is not None:
                found.add(node.key)
                node = level.tree.node(node.parent) if node.parent in level.tree else None
    return found


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", POLICIES)
def test_what_has_no_copy_is_known_after_every_request(name: str, ahead: float, waits: bool) -> None:
    requests = conversations(6, 4, pause=0.4)
    for blocks in ((30,), (20, 25), (12, 10, 60)):
        run = Checked(machine(*blocks, ahead=ahead, waits=waits), POLICIES[name]).run(requests)
        assert len(run.first) == len(requests)
        assert sum(run.hits.values()) <= run.blocks == sum(len(r.keys) for r in requests)
        assert min(run.first) >= prefill(100, 700) - 1e-9


def test_with_idle_links_copies_ahead_make_eviction_free() -> None:
    """Pensieve, section 4.3: nothing is waited for, nothing is lost, and the prefix is found again."""
    requests = conversations(6, 4, pause=20.0)
    ahead = replay_tiers(requests, machine(20, 100, ahead=1.0, waits=True), LRU)
    when_leaving = replay_tiers(requests, machine(20, 100, ahead=0.0, waits=True), LRU)
    for found in (ahead, when_leaving):
        assert found.dropped["tier 0"] == 0
        assert found.copied["tier 1"] <= 48 * BLOCK, "a block is copied once"
    assert ahead.stalled == 0.0
    assert when_leaving.stalled > 0.0
    assert sum(ahead.first) < sum(when_leaving.first)


def totals(found: Replayed) -> tuple[float, float]:
    return sum(found.first), found.percentile(0.99)


@pytest.mark.parametrize("pause", [0.2, 0.5, 2.0])
@pytest.mark.parametrize("rate", [200.0, 1000.0, 20_000.0])
@pytest.mark.parametrize("turns", [5, 12])
def test_copies_ahead_never_hurt(turns: int, rate: float, pause: float) -> None:
    """Live blocks are 1.8 times what the host holds; short and long conversations, slow links and fast ones.

    No saving is never better where nothing is waited for. Copies made when blocks leave are not either where the last
    tier holds all, and by a tenth at most where that is the host and is waited for: it has room for fewer blocks if it
    holds copies of what the device has too.
    """
    requests = conversations(12, turns, pause=pause)
    device, host = 4 * turns, 24 * turns * 10 // 18
    plain, every = replay_tiers(requests, machine(device, ahead=0.0), LRU), (host, 40 * turns)
    for below, waits, than_plain, than_leaving in (
        ((host,), False, 1.02, math.inf),
        ((host,), True, math.inf, 1.1),
        (every, False, 1.02, 1.02),
    ):
        saving = replay_tiers(requests, machine(device, *below, rate=rate, ahead=0.5, waits=waits), LRU)
        when_leaving = replay_tiers(requests, machine(device, *below, rate=rate, ahead=0.0, waits=True), LRU)
        for other, most in ((plain, than_plain), (when_leaving, than_leaving)):
            for before, after in zip(totals(other), totals(saving), strict=True):
                assert after <= most * before


@pytest.mark.parametrize("turns", [5, 12])
def test_half_a_tier_that_is_copied_is_half_that_eviction_can_have(turns: int) -> None:
    """With idle links nothing is lost: a copied block that a block without a copy continues is not counted."""
    requests = conversations(12, turns, pause=20.0)
    found = replay_tiers(requests, machine(4 * turns, 48 * turns, rate=20_000.0, ahead=0.5), LRU)
    assert found.dropped == {"tier 0": 0, "tier 1": 0}
    assert found.hits["tier 1"] > 0


def test_a_fetch_goes_before_copies() -> None:
    """A link with copies to make keeps a fetch waiting for the one block on its way, and no longer."""
    below = Level(Tier("host", 100), LRU, machine(50, 100), None)
    level = Level(Tier("device", 50, 1000.0, 1000.0), LRU, machine(50, 100, ahead=1.0), below)
    for i in range(50):
        level.insert(i, None, 1, 0.0)
    level.advance(1.05)
    assert level.copied == 10
    assert level.fetch(10, 1.05) == pytest.approx(1.05 + 0.1 + 1.0)
    level.advance(2.15)
    assert level.copied <= 11, "no copies while the fetch is under way"
    level.advance(3.15)
    assert level.copied >= 20


def test_a_part_of_the_device_is_left_to_those_that_decode() -> None:
    """Pensieve, section 4.3: new requests are admitted while more than 10% stays free."""
    requests = [Request(0.0, tuple((i, j) for j in range(5)), 500, 1000, 100) for i in range(6)]
    seen = []

    class Watched(_Replay):
        def request(self, number: int, request: Request) -> None:
            super().request(number, request)
            seen.append(self.in_use)

    for reserve, most in ((0.1, 15), (0.0, 20)):
        seen.clear()
        Watched(machine(20, 100, reserve=reserve), LRU).run(requests)
        assert max(seen) == most


def test_what_is_slower_to_fetch_than_to_compute_is_computed() -> None:
    requests = conversations(6, 4, pause=20.0)
    slow = replay_tiers(requests, machine(20, 100, rate=1.0, ahead=0.0), LRU)
    assert slow.hits["tier 1"] == 0
    fast = replay_tiers(requests, machine(20, 100, rate=1e6, ahead=0.5), LRU)
    assert fast.hits["tier 1"] > 0
    assert sum(fast.first) < sum(slow.first)


def test_a_copy_below_is_not_dropped_for_another_one() -> None:
    """A host smaller than what the device would have copied: the link comes to rest."""
    below = Level(Tier("host", 10), LRU, machine(50, 10), None)
    level = Level(Tier("device", 50, 1000.0, 1000.0), LRU, machine(50, 10, ahead=1.0), below)
    for i in range(50):
        level.insert(i, None, 1, 0.0)
    level.advance(1000.0)
    assert level.copied == 10


@pytest.mark.parametrize(("doubled", "copies"), [(0.0, 0), (0.4, 4), (1.0, 10)])
def test_what_is_only_below_goes_for_so_many_copies(doubled: float, copies: int) -> None:
    below = Level(Tier("host", 10), LRU, machine(50, 10), None)
    level = Level(
        Tier("device", 50, 1000.0, 1000.0), LRU, machine(50, 10, ahead=1.0, waits=True, doubled=doubled), below
    )
    for i in range(10):
        below.insert(("only here", i), None, 1, 0.0)
    for i in range(50):
        level.insert(i, None, 1, 0.0)
    level.advance(1000.0)
    assert level.copied == copies


def test_a_machine_that_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one tier"):
        replay_tiers([], machine(), LRU)
    with pytest.raises(ConfigError, match="does not fit the device of 5"):
        replay_tiers(conversations(1, 3, 1.0), machine(5), LRU)


def test_one_of_a_hundred_exceeds_the_99th_percentile() -> None:
    for count in (100, 300):
        found = Replayed(first=[float(i) for i in range(count, 0, -1)])
        assert sum(x > found.percentile(0.99) for x in found.first) == count // 100
        assert sum(x > found.percentile(0.5) for x in found.first) == count // 2
    assert Replayed(first=[1.0, 2.0]).percentile(1.0) == 2.0
    assert Replayed(first=[3.0]).percentile(0.99) == 3.0
