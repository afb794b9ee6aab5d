"""Several tiers under a trace, on a virtual clock: the policies' own objects, requests one after the other.

The model. A request waits for the device, then for room there; what the device lacks of its prefix comes over the links
while the device computes the rest (Pensieve, section 4.3), or is computed too where that is sooner. From its first
token on it decodes at a fixed pace, and its blocks are in use until its end. Prefills take turns.

Each tier has a prefix tree. A block that the next tier has a copy of is evicted for nothing. Copies are made ahead,
where less than a threshold of a tier can be had for nothing (section 4.3 of the paper: 50%): a second tree of the same
policy, of the blocks without a copy, gives their order, so that what is evicted next is copied first. A copied block
that a block without a copy continues does not count: eviction comes to it later, and loses the other one before. Where
what has no copy is waited for, a full tier gives an eighth of itself to copies made ahead; for more of them nothing
goes that is nowhere else. A link moves copies only while no fetch uses it; a fetch waits for the one block that is on
its way.

What the model does not say: how fast a machine decodes while it copies. Decoding has a fixed pace here and reads the
device alone, so that nothing can slow it down; that is measured on a store, in benchmarks/scenarios/saving.py.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvtier.errors import ConfigError
from kvtier.eviction.policy import EvictionPolicy, Key, Node
from kvtier.eviction.replay.traces import Request
from kvtier.eviction.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier, and the link to the one below it.

    Attributes:
        name: such as "device".
        blocks: that it holds.
        up, down: of the link to the next tier, bytes per second. Of no account for the last one.
    """

    name: str
    blocks: int
    up: float = math.inf
    down: float = math.inf


@dataclass(frozen=True, slots=True)
class Machine:
    """What the requests run on.

    Attributes:
        tiers: the device first.
        block_bytes: of one block.
        prefill: seconds for so many new tokens behind so many past ones.
        decode: seconds for each token generated.
        ahead: share of a tier that is to be had for nothing, free or copied; 0.0: no copies are made ahead.
        waits: whether a block without a copy is copied when it has to leave, and the request waits for it. Otherwise it
            is dropped.
        doubled: share of a full tier that may be copies made ahead, if the machine waits: for more of them nothing goes
            that is nowhere else. Otherwise they are all that is saved of the tier above.
        reserve: share of the device that new requests leave to those that decode (section 4.3).
    """

    tiers: tuple[Tier, ...]
    block_bytes: int
    prefill: Callable[[int, int], float]
    decode: float
    ahead: float = 0.5
    waits: bool = False
    doubled: float = 0.125
    reserve: float = 0.1


@dataclass(slots=True)
class Replayed:
    """What a replay took.

    Attributes:
        first: seconds from each request's arrival to its first token.
        busy: seconds of prefill and of waiting for fetches, all requests.
        saved: seconds that prefills of whole prompts would have taken beyond that.
        blocks: of all prompts.
        hits: by tier, blocks that were used from there.
        fetched, copied: by tier, bytes that came up to the device from it, and bytes copied to it.
        dropped: by tier, blocks that left it without a copy.
        stalled: seconds in which requests waited for copies.
        queued: seconds in which requests waited for room.
    """

    first: list[float] = field(default_factory=list)
    busy: float = 0.0
    saved: float = 0.0
    blocks: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    stalled: float = 0.0
    queued: float = 0.0

    @property
    def median(self) -> float:
        """Of the seconds to the first token."""
        return statistics.median(self.first)

    def percentile(self, part: float) -> float:
        """Of the seconds to the first token: 0.99 gives that which one of a hundred exceeds."""
        return sorted(self.first)[max(math.ceil(part * len(self.first)) - 1, 0)]


class Level:
    """A tier at work: what it holds, what of that has no copy below, and the link down.

    Attributes:
        tree: all of its blocks.
        bare: those of them without a copy below, less the one that is being copied.
        shut: those that eviction cannot come to for nothing: in use, without a copy, or continued by such a block.
        copied, dropped: blocks copied to the tier below, and blocks that left without a copy.
    """

    def __init__(self, tier: Tier, make: Callable[[], EvictionPolicy], machine: Machine, below: Level | None) -> None:
        self.tier, self.below, self._machine = tier, below, machine
        self.tree = PrefixTree(make(), tier.blocks)
        self.bare = PrefixTree(make(), tier.blocks)
        self.shut: set[Key] = set()
        # By block, how many of those that continue it are shut. The block itself need not be here.
        self._shut_children: dict[Key, int] = {}
        self.copied = self.dropped = 0
        self._moving: Key | None = None
        self._now = self._fetching = self._left = 0.0

    def insert(self, key: Key, parent: Key | None, depth: int, now: float, *, held: bool = False) -> None:
        """A block is here from now on; there is room."""
        node = self.tree.insert(key, parent, now, depth=depth, held=held)
        if self.below is not None and key not in self.below.tree:
            self.bare.insert(key, parent, now, depth=depth)
        self._refresh(node)

    def reuse(self, key: Key, now: float) -> None:
        """A block is used."""
        self.tree.reuse(key, now)
        if key in self.bare:
            self.bare.reuse(key, now)

    def hold(self, key: Key) -> None:
        """The path that ends with this block is in use."""
        self.tree.hold(key)
        self._refresh(self.tree.node(key))

    def release(self, key: Key) -> None:
        """The opposite of `hold`."""
        self.tree.release(key)
        self._refresh(self.tree.node(key))

    @property
    def room(self) -> int:
        """Blocks that can be had for nothing: what is free, and what is copied and continued by copied blocks only."""
        return self.tier.blocks - len(self.shut)

    def _refresh(self, node: Node) -> None:
        """A block is inserted, copied, used or gone: whether it is shut, and then the blocks that it continues.

        Of a path all blocks change together with its end, or none, so that a request takes no more than O(its blocks).
        """
        here: Node | None = node
        while here is not None:
            key, parent = here.key, here.parent
            shut = key in self.tree and (
                here.users > 0 or key in self._shut_children or key in self.bare or key == self._moving
            )
            if shut == (key in self.shut):
                return
            (self.shut.add if shut else self.shut.remove)(key)
            if parent is None:
                return
            count = self._shut_children.get(parent, 0) + (1 if shut else -1)
            if count:
                self._shut_children[parent] = count
            else:
                del self._shut_children[parent]
            here = self.tree.node(parent) if parent in self.tree else None

    def make_room(self, now: float, above: Level | None = None) -> float | None:
        """Evict one block if the tier is full. Returns seconds that were waited for; None if nothing may leave."""
        if self.tree.free > 0:
            return 0.0
        node = self.tree.victim(now)
        if node is None:
            return None
        key, waited = node.key, 0.0
        if self.below is None:
            self.dropped += 1
        elif key not in self.below.tree:
            written = self._write(key, now) if self._machine.waits else None
            waited = written or 0.0
            self.dropped += written is None
        self.tree.evict(now)
        if key == self._moving:
            self._moving = None
        if key in self.bare:
            self.bare.remove(key)
        self._refresh(node)
        if above is not None and key in above.tree and key != above._moving:
            # The block itself stays, without a copy.
            there = above.tree.node(key)
            above.bare.insert(key, there.parent, now, depth=there.depth)
            above._refresh(there)
        return waited

    # The link

    @property
    def _block_seconds(self) -> float:
        return self._machine.block_bytes / self.tier.down

    def fetched_by(self, blocks: int, now: float) -> float:
        """When so many blocks would have come up to the tier above."""
        begin = max(now, self._fetching) + (self._block_seconds if self._moving is not None else 0.0)
        return begin + blocks * self._machine.block_bytes / self.tier.up if blocks else now

    def fetch(self, blocks: int, now: float) -> float:
        """They come up. Returns when they are there."""
        end = self.fetched_by(blocks, now)
        if blocks:
            self._fetching = end
        return end

    def advance(self, now: float) -> None:
        """Let the links move copies until now, in the time in which no fetch uses them."""
        if self.below is None:
            return
        seconds = self._block_seconds
        self._left += max(now - max(self._now, self._fetching), 0.0)
        self._now = max(self._now, now)
        while self._choose(now) and self._left >= seconds:
            self._left -= seconds
            key, self._moving = self._moving, None
            if key is not None:
                self._copy(key, now)
        if self._moving is None:
            self._left = 0.0  # what an idle link did not do is not done later
        self.below.advance(now)

    def _choose(self, now: float) -> bool:
        """Begin with the next copy, if less than the threshold is free or copied. Returns whether one is under way."""
        if self._moving is None and self.room < self._machine.ahead * self.tier.blocks and self._gains(now):
            self._moving = self.bare.evict(now)
        return self._moving is not None

    def _gains(self, now: float) -> bool:
        """Whether a further copy is worth what a tier below that is full drops for it: not another copy of this tier,
        and what is nowhere else only for some."""
        below = self.below
        if below is None or below.tree.free > 0:
            return below is not None
        made = len(self.tree) - len(self.bare)
        if self._machine.waits and made >= self._machine.doubled * below.tier.blocks:
            return False
        node = below.tree.victim(now)
        return node is not None and node.key not in self.tree

    def _write(self, key: Key, now: float) -> float | None:
        """Copy a block that has to leave. Returns seconds that are waited for; None if the tier below has no room."""
        waited = self._copy(key, now)
        if waited is None:
            return None
        self._fetching = max(self._fetching, now) + self._block_seconds
        return self._fetching - now + waited

    def _copy(self, key: Key, now: float) -> float | None:
        """A copy is made. Returns seconds that the tier below waited for room; None if it has none."""
        below, node = self.below, self.tree.node(key)
        assert below is not None
        waited = below.make_room(now, self)
        if waited is None:
            # All of the tier below is being read.
            if key not in self.bare:
                self.bare.insert(key, node.parent, now, depth=node.depth)
            return None
        below.insert(key, node.parent, node.depth, now)
        if key in self.bare:
            self.bare.remove(key)
        self._refresh(node)
        self.copied += 1
        return waited


def replay_tiers(requests: Sequence[Request], machine: Machine, make: Callable[[], EvictionPolicy]) -> Replayed:
    """Replay a trace on a machine, with a policy of its own for each tier.

    Raises:
        ConfigError: no tier, or a request whose prompt the device cannot hold.
    """
    if not machine.tiers:
        raise ConfigError("a machine has at least one tier, its device.")
    return _Replay(machine, make).run(requests)


class _Replay:
    def __init__(self, machine: Machine, make: Callable[[], EvictionPolicy]) -> None:
        self.machine = machine
        self.levels: list[Level] = []
        below: Level | None = None
        for tier in reversed(machine.tiers):
            below = Level(tier, make, machine, below)
            self.levels.insert(0, below)
        self.device = self.levels[0]
        #: Ends of those that decode, with the last block of each and the blocks that it began with.
        self.decoding: list[tuple[float, int, Key, int]] = []
        self.in_use = 0
        self.free_at = 0.0
        self.out = Replayed(hits={tier.name: 0 for tier in machine.tiers})

    def run(self, requests: Sequence[Request]) -> Replayed:
        for i, request in enumerate(requests):
            if request.keys:
                self.request(i, request)
        out, nbytes = self.out, self.machine.block_bytes
        for above, below in pairwise(self.levels):
            out.copied[below.tier.name] = above.copied * nbytes
        for level in self.levels:
            out.dropped[level.tier.name] = level.dropped
        out.fetched = {name: hits * nbytes for name, hits in out.hits.items() if name != self.device.tier.name}
        return out

    def request(self, number: int, request: Request) -> None:
        out, keys, device = self.out, request.keys, self.device
        if len(keys) > device.tier.blocks * (1 - self.machine.reserve):
            raise ConfigError(f"a prompt of {len(keys)} blocks does not fit the device of {device.tier.blocks}.")
        now = self.admitted(max(request.time, self.free_at), len(keys))
        device.advance(now)
        where = self.walk(keys)
        cut = self.cut(request, where, now)
        stalled = self.bring(keys, where[:cut], now)
        out.stalled += stalled
        start = now + stalled
        ready = start
        for level in self.levels[1:]:
            blocks = sum(x is level for x in where[:cut])
            # What is on the disk comes over every link above it.
            for link in self.levels[: self.levels.index(level)]:
                ready = max(ready, link.fetch(blocks, start))
        first = max(start + self.prefill(request, cut), ready)
        for level in where[:cut]:
            out.hits[level.tier.name] += 1
        out.blocks += len(keys)
        out.first.append(first - request.time)
        out.busy += first - start
        out.saved += self.machine.prefill(request.tokens, 0) - (first - start)
        self.free_at = first
        self.in_use += len(keys)
        end = first + request.output * self.machine.decode
        heapq.heappush(self.decoding, (end, number, keys[-1], len(keys)))

    def admitted(self, now: float, blocks: int) -> float:
        """When there is room, apart from what is reserved for those that decode. Shared blocks count for each."""
        began = now
        most = self.device.tier.blocks * (1 - self.machine.reserve)
        while self.decoding and (self.decoding[0][0] <= now or self.in_use + blocks > most):
            end, _, last, held = heapq.heappop(self.decoding)
            now = max(now, end)
            self.device.release(last)
            self.in_use -= held
        self.out.queued += now - began
        return now

    def walk(self, keys: Sequence[Key]) -> list[Level]:
        """Where each block is, up to the first one that is nowhere."""
        found = []
        for key in keys:
            level = next((level for level in self.levels if key in level.tree), None)
            if level is None:
                break
            found.append(level)
        return found

    def prefill(self, request: Request, blocks: int) -> float:
        """Seconds for all but the first blocks; the last token is always computed."""
        past = min(blocks * request.block, request.tokens - 1)
        return self.machine.prefill(request.tokens - past, past)

    def cut(self, request: Request, where: Sequence[Level], now: float) -> int:
        """How many blocks of what is there are used, so that the first token comes soonest."""
        head = next((i for i, level in enumerate(where) if level is not self.device), len(where))
        ends = [head, *(i for i in range(head + 1, len(where)) if where[i] is not where[i - 1]), len(where)]

        def seconds(cut: int) -> float:
            ready = now
            for i, link in enumerate(self.levels[:-1]):
                below = self.levels[i + 1 :]
                ready = max(ready, link.fetched_by(sum(x in below for x in where[:cut]), now))
            return max(ready - now, self.prefill(request, cut))

        return min(ends, key=lambda end: (seconds(end), -end))

    def bring(self, keys: Sequence[Key], where: Sequence[Level], now: float) -> float:
        """All blocks of a prompt to the device. Returns seconds that were waited for room."""
        device, stalled = self.device, 0.0
        for key, level in zip(keys, where, strict=False):
            # What is read is not evicted meanwhile.
            for other in self.levels:
                if key in other.tree:
                    other.reuse(key, now)
            level.hold(key)
        last: Key | None = None
        for i, key in enumerate(keys):
            if key in device.tree:
                device.hold(key)
            else:
                waited = device.make_room(now)
                assert waited is not None, "what decodes and this prompt fit"
                stalled = max(stalled, waited)
                device.insert(key, last, i + 1, now, held=True)
            if last is not None:
                device.release(last)
            last = key
        for key, level in zip(keys, where, strict=False):
            level.release(key)
        return stalled
