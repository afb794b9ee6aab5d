"""One world: a store, its memory, transfers, planner, folder and other users of the memory, in one thread and on a
clock of its own, with faults.

    python tests/conversation/world.py SEED ...

says what happens in the world of a seed. See docs/design/world.md.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "memory"), str(Path(__file__).resolve().parents[2])]

import pytest
import torch
from rough_disk import Killed, Rough, RoughDisk, rough
from toy import END, PAD, VOCAB, States, Toy
from walk import Asynchronous, RandomPolicy, Watched

from kvtier import (
    BudgetError,
    ConfigError,
    ConversationStore,
    CorruptionError,
    KVTierError,
    StoreInUseError,
    TieredKVCache,
    TieredMemory,
    TransferError,
)
from kvtier.conversation import names
from kvtier.conversation.calls import columns, prefix_reuse
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files import ahead
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import WIDTH, common, packed, unpacked
from kvtier.conversation.kept import kept, retention
from kvtier.conversation.saved import archive, wake
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.disk_tier import _key as disk_key
from kvtier.conversation.saved.soon import Soon
from kvtier.conversation.saved.tail import Tail
from kvtier.conversation.saved.wake import Wake, Waker
from kvtier.cpu.native import Future
from kvtier.eviction.policies.names import POLICIES as EVICTIONS
from kvtier.eviction.rank import DEFAULT, Rank
from kvtier.hf.models import trials
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.identity.dependence import computed_as
from kvtier.hf.models.names import CACHE
from kvtier.memory.blocks.block import RESIDENT, State
from kvtier.memory.storage import system
from kvtier.memory.tiered import default_engine
from kvtier.planning.policies.names import POLICIES
from kvtier.planning.policy import Policy
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix
from kvtier.testing import with_doubles
from kvtier.transfer.engine import Transfer

#: Salts of which nothing is woken.
NOBODY = ("of nobody who is woken",)
#: Kinds of faults of which a world has some, or none.
FAULTS = ("pressure", "transfers", "interrupts", "disk", "rot", "kills", "power", "flips")
#: Tokens of a history that is not made longer.
LONGEST = 48
#: Bytes that nobody here comes to.
PLENTY = 10**8


class Interrupted(KeyboardInterrupt):
    """Somebody has interrupted a forward."""


class Clock:
    """Stands in for the module `time`: it goes on when it is looked at, or when somebody sleeps.

    Attributes:
        now: seconds.
        wrong: what the time of day is off by: that is set, also back.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now, self.wrong, self.random = 1e6, 0.0, rng

    def perf_counter(self) -> float:
        """Seconds."""
        self.now += self.random.random() * 1e-4
        return self.now

    monotonic = perf_counter

    def time(self) -> float:
        """Seconds, of the time of day."""
        return self.perf_counter() + self.wrong

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(seconds, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Failing:
    """Engines of which transfers fail when they would run; where nothing fails, they are as they were."""

    world: World

    def _start(self, transfer: Transfer, behind: Any) -> None:
        self.world.interrupt(0.3)
        super()._start(transfer, behind)  # type: ignore[misc]
        self.world.interrupt(0.3)

    def _run(self, transfer: Transfer) -> None:
        world = self.world
        if transfer in self._pending and world.on.get("transfers", 0.0) > world.rng.random():  # type: ignore[attr-defined]
            for earlier in transfer.after:
                self._run(earlier)
            self._pending.remove(transfer)  # type: ignore[attr-defined]
            world.note("a transfer fails")
            transfer.settle(RuntimeError("this transfer was made to fail"))
            return
        super()._run(transfer)  # type: ignore[misc]


class FailingWatched(Failing, Watched):
    """Copies that run late and in any order."""


class FailingAsynchronous(Failing, Asynchronous):
    """As a CUDA device seems to the CPU."""


@dataclass
class Kept:
    """A sequence that was kept.

    Attributes:
        key: of the store, but for the salt's place.
        ids: its tokens.
        here, saved: whether it is surely in memory, and on the disk.
    """

    key: Any
    ids: list[int]
    here: bool
    saved: bool = False


@dataclass
class Chat:
    """What a conversation is.

    Attributes:
        salt: of its calls.
        ids, messages: as they are now.
        before: states that it has had.
        ends: tokens after so many messages.
        rank: as it is now.
    """

    salt: Any
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    before: list[tuple[list[int], list[dict[str, str]]]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    rank: Rank = DEFAULT

    @classmethod
    def of(cls, there: Conversation) -> Chat:
        """As a store has it."""
        return cls(there.salt, list(there.ids), list(there.messages), ends=dict(there.ends), rank=there.rank)

    def note(self) -> None:
        """It has changed."""
        self.before.append((list(self.ids), list(self.messages)))


class Tokens:
    """A tokenizer whose texts are digits."""

    chat_template = "roles"

    @staticmethod
    def apply_chat_template(messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        """Ids of a chat."""
        return [x for m in messages for x in (1 if m["role"] == "user" else 2, *map(int, m["content"]))]

    @staticmethod
    def decode(ids: Sequence[int] | torch.Tensor, **_: Any) -> str:
        """The text of ids."""
        return "".join(str(int(x)) for x in ids if int(x) != PAD)


class Guest:
    """Another cache on the same memory, of another model."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.model = Toy(self.rng)
        self.cache = self._cache()
        self.rows: list[list[int]] = []

    def _cache(self) -> TieredKVCache:
        return TieredKVCache(
            self.model.config,
            memory=self.world.memory,
            block_size=self.rng.choice((4, 8)),
            host_attention=self.rng.random() < 0.6,
        )

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return len(self.rows[0]) if self.rows else 0

    def step(self) -> None:
        """Grow, shrink, change rows or begin again."""
        how = self.rng.choice(("grow", "grow", "grow", "crop", "reorder", "reset"))
        if how == "grow" or not self.length:
            self.grow(self.rng.choice((1, 1, 3, 9, 20)))
        elif how == "crop" or self.length > LONGEST:
            self.crop(self.rng.randrange(self.length + 1))
        elif how == "reorder":
            order = [self.rng.randrange(len(self.rows)) for _ in self.rows]
            self.cache.reorder_cache(torch.tensor(order))
            self.rows = [list(self.rows[i]) for i in order]
        else:
            self.cache.reset()
            self.rows = []

    def crop(self, length: int) -> None:
        """Keep the first tokens."""
        self.cache.crop(length - self.cache.get_seq_length())
        self.rows = [row[:length] for row in self.rows] if length else []

    def grow(self, count: int) -> None:
        """A forward."""
        rows = self.rows or [[] for _ in range(self.rng.choice((1, 1, 2)))]
        new = [[self.rng.randrange(1, VOCAB) for _ in range(count)] for _ in rows]
        known = [self.model.prefixes(row + more) for row, more in zip(rows, new, strict=True)]
        try:
            with torch.no_grad():
                self.model(input_ids=torch.tensor(new), known=known, **{CACHE: self.cache})
        except BudgetError:
            assert self.world.tight, "a budget that is large enough is refused"
            assert self.cache.get_seq_length() == self.length, "a forward that was refused has changed the cache"
        except TransferError:
            assert "transfers" in self.world.faults
            if self.length:
                self.cache.crop(0)
                self.crop(self.length)
            else:
                self.cache.reset()
        else:
            self.rows = [row + more for row, more in zip(rows, new, strict=True)]

    def close(self) -> None:
        """Give everything back."""
        self.cache.close()


class World:
    """What happens to one store.

    Args:
        seed: of everything.
        root: a folder for it.
        say: is told what happens.

    Attributes:
        faults: kinds that it has; `on` says which of them there are now, with their probabilities.
        folder: of the store; None: it keeps nothing for later processes.
        did: how often what happened.
        faultless: whether it has no faults at all.
    """

    def __init__(self, seed: int, root: Path, say: Callable[[str], None] | None = None) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self._say = say
        self.did: dict[str, int] = {}
        rng = self.rng
        self.faults = set() if rng.random() < 0.3 else set(rng.sample(FAULTS, rng.choice((1, 1, 2, 3, len(FAULTS)))))
        if self.faults and rng.random() < 0.25:
            self.faults.add("pressure")
        self.faultless = not self.faults
        self.on: dict[str, float] = {}
        self.disk = RoughDisk(random.Random(seed + 1), root)
        self.disk.idle = self.idle
        saves = rng.random() < 0.7 or not self.faults.isdisjoint(("disk", "rot", "kills", "power"))
        self.folder = self.disk.new_folder() if saves else None
        self.disk_budget = rng.choice((None, None, None, 6_000, 12_000, 40_000)) if saves else None
        states: tuple[States, ...] = ("",) * 7 + ("windows", "windows", "recurrent")
        self.toy = Toy(random.Random(seed + 2), rng.choice(states))
        self.toy.meanwhile = self.meanwhile
        self.plain = not self.toy.states
        self.weight = float(self.toy.weight.detach())
        self.changed_weights = False
        self.damaged = self.flipped = self.changed_folder = False
        self.reads_to_nothing = self.cleared = 0
        #: By salt.
        self.computed: dict[Any, set[int]] = {}
        self.kept: list[Kept] = []
        self.histories: list[list[int]] = [self.words(rng.randint(1, 20))]
        self.chats: dict[str, Chat] = {}
        #: Conversations that are changed now.
        self.changing: list[str] = []
        #: Of conversations that are pinned, where their tokens are looked for, and what is there of them in memory and
        #: on the disk: that does not become less.
        self.pinned: dict[str, tuple[Any, int, int]] = {}
        self.wakes: list[Wake] = []
        #: Whether a step of a wake is under way; and whether something happens in its midst.
        self.waking = self.disturbed = False
        self.guests: list[Guest] = []
        self.depth, self.over = 0, False
        #: Of the store of the process that was killed last.
        self.problem = ""
        #: What went wrong where nobody would hear of it.
        self.failed: Exception | None = None
        #: Whether what is done now may be interrupted: other threads are not.
        self.interruptible = False
        self.memory: TieredMemory
        self.store: ConversationStore | None = None
        self.options: dict[str, Any] = {
            "block_size": rng.choice((2, 4, 4, 8, 16)),
            "host_attention": rng.random() < 0.7,
            "eviction": rng.choice((None, *EVICTIONS)),
            "loading": "always" if rng.random() < 0.7 else "auto",
        }
        if rng.random() < 0.3:
            self.options["state_budget"] = rng.choice((400, 2000, 20_000))
        self.audit = "full" if "flips" in self.faults else rng.choice(("off", "sampled", "full"))
        self.engine = rng.choice(("inline", "watched", "late", "asynchronous"))
        if self.faults & {"transfers", "interrupts"} and self.engine == "inline":
            self.engine = "watched"
        self.policy = rng.choice(("random", "wild", *POLICIES))
        self.tight = "pressure" in self.faults
        room = 60 * self.toy.token_bytes
        self.device_budgets: Sequence[int | None] = (
            (room, 3 * room, 20 * room) if self.tight else (PLENTY, PLENTY, 100_000)
        )
        # Worlds differ in what is frequent: what is rare everywhere would never come together.
        self.often = [rng.choice((0.3, 1.0, 1.0, 4.0)) for _ in range(40)]
        self.tiers = rng.random() < 0.7
        self.host_budgets = (room, 2 * room, 4 * room, 12 * room) if self.tight else (PLENTY,)

    # Say and note

    def note(self, what: str, *about: Any) -> None:
        """Something happens."""
        name = what.split(":")[0]
        self.did[name] = self.did.get(name, 0) + 1
        if self._say is not None:
            said = " ".join([what, *map(str, about)]).replace(f"{self.disk.root}/", "")
            self._say("  " * self.depth + said)

    def words(self, count: int) -> list[int]:
        """Token ids."""
        return [self.rng.choice((1, 2, 3, 4, 5, 6)) for _ in range(count)]

    # Life of a store

    def _engine(self, device: torch.device) -> Any:
        if self.engine == "inline":
            return default_engine(device)
        kind = FailingAsynchronous if self.engine == "asynchronous" else FailingWatched
        made = kind(device, self.rng.randrange(2**30), self.rng.choice((0.0, 0.1, 0.3)), self.engine != "watched")
        made.world = self
        return made

    def open(self) -> None:
        """A process begins."""
        rng = self.rng
        seed = rng.randrange(2**30)
        policy: Any = self.policy
        if policy in ("random", "wild"):
            policy = RandomPolicy(seed, wild=policy == "wild")
        elif policy == "default":
            policy = Policy(write_through=rng.choice((0.0, 0.5, 1.0)))
        budgets: dict[str, Any] = {"host_budget": rng.choice(self.host_budgets), "policy": policy, "audit": self.audit}
        if self.tiers:
            budgets["device_budget"] = rng.choice(self.device_budgets)
        self.memory = with_doubles(TieredMemory(**budgets), self._engine)
        self.budgets = budgets
        self.flipped = False
        self.pinned.clear()
        if any(chat.rank.ttl < math.inf for chat in self.chats.values()):
            for each in self.kept:
                each.saved = False  # when a folder is opened, what has not been used for long goes
        self.disk.use(self.folder)
        where: dict[str, Any] = {}
        if self.folder is not None:
            where = {"directory": self.folder, "disk_budget": self.disk_budget}
        self.note("open:", {**budgets, "policy": self.policy}, where and self.folder.name)
        while self.store is None:
            try:
                self.store = ConversationStore(self.toy, memory=self.memory, **self.options, **where)
            except (ConfigError, StoreInUseError) as error:
                assert self.disk.failing, "a folder cannot be opened"
                self.note("not opened:", error)
                if rng.random() < 0.5:
                    self.set_disk(0.0)
        self.changed_weights = False
        archive = archive_of(self.store)
        if archive is not None:
            if not self.rough_disk:
                assert archive.disk.damaged == 0, "what was saved is damaged"
            self._compare_chats()

    @property
    def rough_disk(self) -> bool:
        """Whether something that was saved may be lost or damaged."""
        return self.disk.failed > 0 or self.damaged

    def _saved_chat(self, name: str) -> Conversation | None:
        """A conversation, read when the disk lets it be where it is not in memory; None: there is none."""
        assert self.store is not None
        while True:
            try:
                return self.store.conversations.find(name)
            except ConfigError as error:
                assert self.disk.failing, "a conversation cannot be read"
                self.note("not read:", error)
                if self.rng.random() < 0.5:
                    self.set_disk(0.0)

    def _open_chat(self, name: str) -> Conversation:
        """A conversation, which may have been put away: then it is read when the disk lets it be."""
        self._saved_chat(name)
        assert self.store is not None
        return self.store.open(name, salt=self.chats[name].salt)

    def _said(self) -> dict[str, tuple[list[int], list[dict[str, str]]]]:
        """What was said in each chat. A blank one that the disk did not take is forgotten when nobody holds it."""
        return {name: (chat.ids, chat.messages) for name, chat in self.chats.items() if chat.ids or chat.messages}

    def _compare_chats(self) -> None:
        assert self.store is not None
        found = {name: chat for name in self.store.names if (chat := self._saved_chat(name)) is not None}
        names = set(found)
        for name in self.changing:  # it was changed when the process ended
            self.chats.pop(name, None)
            if name in names:
                self.chats[name] = Chat.of(found[name])
                self.chats[name].note()
        self.changing = []
        saved = {name for name, chat in self.chats.items() if type(chat.salt) in (type(None), str, int)}
        if not self.disk.failed:
            assert names == saved, f"conversations are lost, or back: {names ^ saved}; before: {self.problem!r}"
        for name in list(self.chats):
            if name not in names:
                del self.chats[name]
        for name, there in found.items():
            chat = self.chats.get(name)
            if chat is None:  # it was closed, and the disk did not hear of it
                assert self.disk.failed
                self.chats[name] = Chat.of(there)
                continue
            assert there.salt == chat.salt
            now = (there.ids, there.messages)
            if self.disk.failed:
                assert now in chat.before or now == ([], []) or now == (chat.ids, chat.messages), (
                    "a chat that never was"
                )
                chat.ids, chat.messages, chat.ends = list(there.ids), list(there.messages), dict(there.ends)
                chat.rank = there.rank
            else:
                assert now == (chat.ids, chat.messages), (now, chat, self.problem)
                assert there.rank == chat.rank, "another rank"

    def close(self) -> None:
        """A process ends by itself: it leaves nothing in memory."""
        assert self.store is not None
        stats = self.memory.stats
        self.note("close:", self.store.stats, repr(stats))
        if self.store.stats.dropped:
            self.note("gave room")
        problem = self.store.stats.problem
        if self.faultless and problem:
            known = ("more than the disk budget", "the model was changed")
            assert any(x in problem for x in known), f"nothing goes wrong here: {problem}"
        for guest in self.guests:
            guest.close()
        self.guests.clear()
        self.drained()
        if self.over:
            self._awake()
            self._nothing_claimed()
        self.store.close()
        assert all(each.done for each in self.wakes), "a wake of a store that is closed goes on"
        self.wakes.clear()
        self.store = None
        self._emptied()
        self.memory.close()
        if self.folder is None:
            self.chats.clear()
        for each in self.kept:
            each.here = False

    def _awake(self) -> None:
        """Nobody uses the memory: every wake comes to its end."""
        assert self.store is not None
        for _ in range(500):
            if self.store._waker.step() is None:
                break
            self.memory.drain()
        assert all(each.done for each in self.wakes), "a wake does not end"

    def _nothing_claimed(self) -> None:
        """Nobody uses the memory: no room is promised, but for what is pinned."""
        with self.memory.lock:
            for each in self.memory.parked:
                each.relax()
            claims = any(owner.claims for owner in self.memory.owners)
        assert not claims or any(chat.rank.pinned for chat in self.chats.values()), "somebody claims what nobody uses"

    def _emptied(self) -> None:
        gc.collect()
        memory = self.memory
        memory.check_integrity()
        with memory.lock:
            memory._drain()
            for device in memory.devices:
                device.eviction.cancel()
                assert not device.engine.in_flight(), "a transfer is under way"
            memory.trim(all_free=True)
        stats = memory.stats
        assert (stats.device.used_blocks, stats.host.used_blocks) == (0, 0), "blocks that nobody has"
        assert (stats.device.bytes, stats.host.bytes) == (0, 0), "bytes that nobody has"

    def drained(self) -> None:
        """All that waits to be saved is, or cannot be."""
        assert self.store is not None
        archive = archive_of(self.store)
        self.store.flush()
        assert archive is None or archive._waiting.empty
        if self.sure_of_disk and archive is not None and not self.store._disk_tier.stopped:
            for each in self.kept:
                each.saved = each.saved or (each.here and not isinstance(each.key[-1], tuple))

    @property
    def sure_of_disk(self) -> bool:
        """Whether all that is kept comes to be on the disk, and stays."""
        return self.folder is not None and self.disk_budget is None and not self.rough_disk and self.plain

    def restart(self) -> None:
        """Another process goes on."""
        self.close()
        if self.folder is not None and self.rng.random() < 0.4:
            self.upkeep()
        self.set_weight(self.weight)
        self.open()
        self.wake_up()

    def wake_up(self) -> None:
        """What is saved is not here."""
        if self.rng.random() < 0.5:
            long = [row for row in self.histories[-6:] if len(row) > 8]
            self.wake(self.rng.choice(long) if long else None)

    def died(self) -> None:
        """The process has ended in the midst of something: what it has of its folder is what was there then."""
        disk = self.disk
        assert disk.left is not None
        self.note("killed:", "power" if disk.power else "")
        left, disk.left = disk.left, None
        store, self.store = self.store, None
        failed = disk.failed
        if store is not None:
            self.problem = store.stats.problem
        if archive_of(store) is not None:
            with contextlib.suppress(Exception):
                store._disk_tier.disk.close()
        self.guests.clear()
        self.toy.meanwhile = lambda: None
        del store
        self.memory = None  # type: ignore[assignment]
        gc.collect()
        if not self.over:
            self.toy.meanwhile = self.meanwhile
        for hook in list(self.toy._forward_pre_hooks):
            del self.toy._forward_pre_hooks[hook]
        disk.failed = failed
        self.folder = left
        for each in self.kept:
            each.here = False
        self.depth = 0
        self.waking = self.interruptible = False
        self.wakes.clear()
        self.toy.gives_again = False
        self.set_weight(self.weight)
        self.open()
        if not self.over:
            self.wake_up()

    def set_weight(self, weight: float) -> None:
        """Give the model other weights."""
        if float(self.toy.weight.detach()) != weight:
            self.changed_weights = True
            with torch.no_grad():
                self.toy.weight.fill_(weight)

    def upkeep(self) -> None:
        """What `kvtier store` does to a folder."""
        assert self.folder is not None
        what = self.rng.choice(("compact", "repair", "collect"))
        self.note("upkeep:", what)
        try:
            with Upkeep(self.folder) as found:
                if what == "compact":
                    found.compact(self.rng.choice((10**6, 3000)))
                elif what == "repair":
                    count = found.repair()
                    assert not count or self.rough_disk
                else:
                    found.collect()
                    for each in self.kept:
                        each.saved = False
        except (ConfigError, StoreInUseError):
            assert self.disk.failing
        for each in self.kept if self.rough_disk else ():
            each.saved = False

    # Calls

    def call(
        self,
        run: Callable[[ConversationStore], Any],
        rows: list[list[int]],
        salt: Any,
        options: Any,
        at_least: int = 0,
    ) -> bool:
        """A call of `generate`, of rows that may have different lengths, which re-uses so much. Whether it has given
        tokens."""
        store = self.store
        assert store is not None
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        given = [[PAD] * pad + row for row, pad in zip(rows, pads, strict=True)]
        right = self.toy.answer(given, pads, options)
        key = self.key(salt)
        computed = self.computed.setdefault(key, set())
        before, self.toy.computed = self.toy.computed, computed
        cleared = self.cleared
        most = [self._longest(row, computed) for row in rows]
        least = [max(n, at_least) for n in self._least(key, rows, pads)]
        before_this, self.interruptible = self.interruptible, not self.depth
        self.depth += 1
        woken = [
            x for x in store._waker._queue for row in rows if x._key == (key[0], salt) and _mostly(x._ids, packed(row))
        ]
        try:
            out = run(store)
        except (KVTierError, Interrupted) as error:
            self.note("raised:", type(error).__name__, error)
            self._expected(error)
            self.interruptible = False
            if isinstance(error, BudgetError) and self.depth == 1:
                self._still_refused(run)
            return False
        finally:
            self.depth -= 1
            self.interruptible = before_this
            self.toy.computed = before
            self.toy.gives_again = False
        assert out == right, f"{out} and not {right}"
        assert all(x._cancelled or x.done for x in woken), "a turn began, and what wakes its conversation goes on"
        if self.store is None:
            return True
        found = [row.cached for row in store.reuse]
        self.note("reused:", found, "of", [len(row) for row in rows], "least", least, "most", most, store.reuse[0].why)
        assert [row.prompt for row in store.reuse] == [len(row) for row in rows]
        for row, had, a, b in zip(store.reuse, found, least, most, strict=True):
            assert had + row.computed == row.prompt
            assert had <= b, "more was re-used than there is"
            assert had >= a or row.why.startswith(("this way", "keys and values")), f"not re-used: {row.why}"
        for ids in self.toy.held:
            while self.plain and len(ids) > 1 and ids[-1] == ids[-2] == PAD:
                ids.pop()
            # What is computed while all is dropped is not kept.
            here = not self.tight and not self.flipped and self.plain and cleared == self.cleared
            self.kept.append(Kept(key, ids, here))
        return True

    def _still_refused(self, run: Callable[[ConversationStore], Any]) -> None:
        """A call was refused: where nothing is kept, it is refused too, for that takes no room that a call needs."""
        calm = not (self.on or self.disk.failing or self.disk.killing or self.flipped or self.folder)
        if not calm or any(chat.rank.pinned for chat in self.chats.values()) or self.rng.random() < 0.5:
            return
        assert self.store is not None
        self.clear()
        with self.alone(), pytest.raises(BudgetError):
            run(self.store)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else has a turn within."""
        before, self.toy.meanwhile = self.toy.meanwhile, lambda: None
        try:
            yield
        finally:
            self.toy.meanwhile = before

    def interrupt(self, chance: float) -> None:
        """Somebody may interrupt what is done now, in the midst of a change."""
        if self.interruptible and self.on.get("interrupts", 0.0) * chance > self.rng.random():
            self.note("interrupted in a change")
            raise Interrupted

    def key(self, salt: Any) -> Any:
        """What keys and values that are computed now are found by."""
        return (computed_as(self.toy), float(self.toy.weight.detach()), salt)

    def _expected(self, error: BaseException) -> None:
        kind: dict[type[BaseException], bool] = {
            BudgetError: self.tight,
            TransferError: "transfers" in self.faults,
            CorruptionError: "flips" in self.faults,
            Interrupted: "interrupts" in self.faults,
        }
        assert kind.get(type(error), False), "an error that nothing explains"
        if isinstance(error, BudgetError):
            pinned = {name for name, chat in self.chats.items() if chat.rank.pinned}
            assert {*error.pinned} <= pinned | {*self.changing}, "it names who is not pinned"

    def _longest(self, row: list[int], computed: set[int]) -> int:
        """The most that may be re-used: what was ever computed of it."""
        n = 0
        for at in self.toy.prefixes(row[:-1]):
            if at not in computed:
                break
            n += 1
        return n

    def _least(self, key: Any, rows: list[list[int]], pads: list[int]) -> list[int]:
        """What is surely re-used: what is surely kept, of all rows up to one column."""
        columns = len(rows[0]) + pads[0] - 1
        if self.tight or self.flipped or not self.plain or "transfers" in self.on:
            return [0] * len(rows)
        for row, pad in zip(rows, pads, strict=True):
            columns = min(columns, pad + self._sure(key, row))
        return [max(columns - pad, 0) if columns > max(pads) else 0 for pad in pads]

    def _sure(self, key: Any, row: list[int]) -> int:
        """Tokens of a row that are surely kept, or saved and loaded."""
        loads = self.options["loading"] == "always" and self.sure_of_disk and not self.disk.failing
        sure = [x.ids for x in self.kept if x.key == key and (x.here or (x.saved and loads))]
        return max((_alike(row, x) for x in sure), default=0)

    def turn(self, salts: Sequence[Any] = (None, None, None, "a", 1, ("b", 2))) -> None:
        """A prompt: a history that goes on, was edited, shortened, is the same again, or begins anew."""
        rng = self.rng
        history = list(rng.choice(self.histories[-6:]))
        how = rng.choice(("extend", "extend", "extend", "edit", "shorten", "again", "other", "batch", "padded"))
        if how == "extend":
            history += self.words(rng.randint(1, 12))
        elif how == "edit":
            at = rng.randrange(len(history))
            history[at : at + 1] = self.words(rng.randint(1, 4))
        elif how == "shorten":
            history = history[: rng.randint(1, len(history))]
        elif how == "other":
            history = self.words(rng.randint(1, 16))
        rows = [history]
        if how == "batch":
            rows += [[*history[:-1], rng.randrange(1, VOCAB)] for _ in range(rng.randint(1, 2))]
        elif how == "padded":
            rows.append(list(rng.choice(self.histories)) + self.words(rng.randint(0, 3)))
        rows = [row[-LONGEST:] for row in rows]
        options: dict[str, Any] = {"max_new_tokens": rng.choice((1, 1, 1, 2, 4))}
        if rng.random() < 0.3:
            options["eos_token_id"] = END
        mode = rng.choice(("greedy",) * 5 + ("beams", "several", "both", "again"))
        if mode in ("beams", "both"):
            options["num_beams"] = 2
        if mode in ("several", "both"):
            options["num_return_sequences"] = 2
        salt = rng.choice(salts)
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self.note(f"turn: {how} {mode}", rows, salt, options)
        self.toy.gives_again = mode == "again"

        def run(store: ConversationStore) -> list[list[int]]:
            found = store.generate(ids, attention_mask=mask, salt=salt, **options).tolist()
            self.histories += [[x for x in row if x != PAD] for row in found]
            return found

        self.call(run, rows, salt, options)
        self.toy.gives_again = False

    def chat(self) -> None:
        """Something with a conversation."""
        rng, store = self.rng, self.store
        assert store is not None
        name = rng.choice(sorted(self.chats)) if self.chats else ""
        if not name or (len(self.chats) < 4 and rng.random() < 0.2):
            name, salt = f"chat {rng.randrange(10**6)}", rng.choice((None, None, "a"))
            self.note("chat: new", name)
            self.changing = [name]
            self.chats[name] = Chat(salt)
            self.chats[name].note()
            there = store.open(name, salt=salt)
            if rng.random() < (0.6 if self.tight else 0.3):
                self.rank(name, there)
            if self.folder is not None:
                store.flush()  # an empty one is saved then
            self.changing = []
            if rng.random() < 0.4:
                return
        chat, there = self.chats[name], self._open_chat(name)
        assert (there.ids, there.messages) == (chat.ids, chat.messages)
        how = rng.choice(
            ("send", "send", "send", "again", "fork", "rewind", "park", "close", "rank", "rank", "wake", "drop")
        )
        if not chat.messages and (how == "again" or rng.random() < 0.7):
            how = "send"
        self.note(f"chat: {how}", name)
        self.changing = [name]
        if how in ("send", "again"):
            if len(chat.ids) > LONGEST:
                chat.messages, chat.ids, chat.ends, how = [], [], {}, "send"
                there.rewind(turns=sum(m["role"] == "user" for m in there.messages))
                chat.note()
            words = "".join(map(str, self.words(rng.randint(1, 5))))
            messages = chat.messages[:-1] if how == "again" else [*chat.messages, {"role": "user", "content": words}]
            prompt = Tokens.apply_chat_template(messages)
            options = {"max_new_tokens": rng.randint(1, 4)}

            def run(store: ConversationStore) -> list[list[int]]:
                if how == "again":
                    there.regenerate(tokenizer=Tokens, **options)
                else:
                    there.send(words, tokenizer=Tokens, **options)
                return [list(there.ids)]

            if self.call(run, [prompt], chat.salt, options):
                alike = common(packed(chat.ids), packed(there.ids))
                chat.ids = list(there.ids)
                answer = {"role": "assistant", "content": Tokens.decode(chat.ids[len(prompt) :])}
                chat.messages = [*messages, answer]
                last = max(chat.ends, default=0)
                again = common(packed(Tokens.apply_chat_template(chat.messages[:last])), packed(chat.ids))
                chat.ends = {
                    n: again if n == last and x > alike else min(x, alike)
                    for n, x in chat.ends.items()
                    if n < len(chat.messages)
                } | {len(chat.messages): len(chat.ids)}
                chat.note()
                self.histories.append(list(chat.ids))
            if rng.random() < 0.2:
                self.rank(name, there)
        elif how == "fork":
            new = f"fork {rng.randrange(10**6)}"
            self.changing.append(new)
            there.fork(new)
            self.chats[new] = Chat(chat.salt, list(chat.ids), list(chat.messages), ends=dict(chat.ends))
            self.chats[new].note()
            if rng.random() < 0.2:
                self.rank(new, self._open_chat(new))
        elif how == "rewind" and chat.messages:
            there.rewind(turns=1)
            chat.messages = chat.messages[:-2]
            chat.ids = chat.ids[: chat.ends.get(len(chat.messages), 0)]
            chat.note()
        elif how == "park":
            self._may_fail(there.park)
        elif how == "rank":
            self.rank(name, there)
        elif how == "wake":
            self.wakes.append(there.wake())
            self.let_come()
        elif how == "drop" and len(chat.ids) > 1:
            self.drop_of(chat.ids, self.key(chat.salt), there.drop)
        elif how == "close":
            there.close()
            del self.chats[name]
            self.pinned.pop(name, None)
        self.changing = []
        if name in self.chats:
            assert (there.ids, there.messages) == (chat.ids, chat.messages)

    def rank(self, name: str, there: Conversation) -> None:
        """A conversation is worth more than others, or less, or may go after a while."""
        rng, chat = self.rng, self.chats[name]
        given: dict[str, Any] = {}
        if rng.random() < 0.6:
            given["pinned"] = rng.random() < 0.7
        if rng.random() < 0.4:
            given["priority"] = rng.choice((-1, 0, 1, 5))
        if rng.random() < 0.3:
            given["ttl"] = rng.choice((0.01, 30.0, 1e5, math.inf))
        self.note("rank:", name, given)
        self._may_fail(lambda: there.set_rank(**given))
        for what, value in given.items():
            if getattr(there.rank, what) != value:  # it was refused, as a whole
                assert there.rank == chat.rank
        chat.rank = there.rank
        self.pinned.pop(name, None)

    # What else happens

    def save_some(self) -> None:
        """A thread that saves has its turn, if it could: nobody here has a lock that it needs."""
        store = self.store
        archive = archive_of(store)
        if archive is None or self.memory.lock._is_owned() or archive.disk._lock._is_owned():  # type: ignore[attr-defined]
            return
        before, self.interruptible = self.interruptible, False
        try:
            if store.conversations._soon.work():  # type: ignore[union-attr]
                self.note("saved soon")
            elif archive.work():
                self.note("saved one")
        finally:
            self.interruptible = before

    def idle(self) -> None:
        """The disk reads, and other threads have their turn. Of these, calls only while a wake reads: what a call finds
        is asked for before."""
        rng, store = self.rng, self.store
        if store is None or not self._unlocked() or store._waker._loading is None or self.over:
            self.save_some()
            return
        what = rng.choice((self.cancel, self.refused, self.refused, self.turn, self.press, self.clear, self.drop))
        if self.depth > 2 or self.changed_weights:
            return
        self.disturbed = True
        self.note("while a wake reads")
        # Who is refused asks a wake to end, and waits for that: in one thread it would wait for ever.
        asked = list(self.memory.conceding)
        self.memory.conceding.clear()
        waker = self.store._waker if self.store is not None else None
        if waker is not None:
            waker._thread = None  # this is another one
        self.depth += 1
        try:
            if what == self.turn:
                self.turn(NOBODY)
            else:
                what()
        except Exception as error:  # the thread that wakes goes on after one
            self.failed = self.failed or error
            raise
        finally:
            self.depth -= 1
            self.memory.conceding[:] = asked
            if waker is not None:
                waker._thread = threading.current_thread()

    def _unlocked(self) -> bool:
        """Whether another thread could do something now: nobody here has a lock that it needs."""
        archive = archive_of(self.store)
        if self.store is None or self.memory.lock._is_owned() or self.store._waker._lock.locked():
            return False
        return archive is None or not archive.disk._lock._is_owned()  # type: ignore[attr-defined]

    def wake(self, row: list[int] | None = None) -> None:
        """A turn is known to come."""
        assert self.store is not None
        salt = None
        if row is None:
            row, salt = self.rng.choice(self.histories[-6:]), self.rng.choice((None, None, "a", ("b", 2)))
        self.note("wake:", row, salt)
        self.wakes.append(self.store.wake(row, salt=salt, timeout=self.rng.choice((None, None, 0.0, 50.0))))
        self.let_come()

    def let_come(self) -> None:
        """A wake has time, or has none."""
        for _ in range(self.rng.choice((0, 0, 1, 8))):
            self.waken()

    def cancel(self) -> None:
        """Nobody waits for a wake any more."""
        if self.wakes:
            self.rng.choice(self.wakes).cancel()

    def refused(self) -> None:
        """Somebody is refused, and wants what a wake claims."""
        assert self.store is not None
        waker = self.store._waker
        loading = waker._loading
        with self.memory.lock:
            assert waker._concede() == (loading is not None), "a wake keeps what it claims"
        assert loading is None or loading._cancelled

    def waken(self) -> None:
        """The thread that wakes makes a step."""
        store = self.store
        if store is None or self.waking or not self._unlocked() or not store._waker._queue:
            return
        waker = store._waker
        each = waker._queue[0]
        loaded, cancelled = each._was_loaded.is_set(), each._cancelled
        key, row = (computed_as(self.toy), each._key[1]), unpacked(each._ids)  # type: ignore[index]
        sure = self._sure(self.key(key[1]), row) if key == each._key else 0
        before, used = (each.loaded, each.promoted), self._in_use() if loaded else []
        self.waking, self.disturbed = True, False
        waker._thread = threading.current_thread()  # refused, it does not wait for itself
        try:
            waker.step()
        finally:
            waker._thread = None
            self.waking = False
        self.note("waken:", each, waker.problem)
        came = each.loaded, each.promoted
        if came > before:
            self.note("woken" if came[0] == before[0] else "loaded ahead")
        assert not cancelled or (each.done and came == before), "a wake that was cancelled goes on"
        assert all(run.state in RESIDENT for run in used), "a wake makes blocks leave that a cache uses"
        calm = not (self.tight or self.flipped or cancelled or self.disturbed or self.changed_weights)
        if not calm or not self.plain or each.why or self.faults & {"transfers", "flips"} or key != each._key:
            return
        with self.memory.lock:
            length, entry = store._kept.find(each._key, each._ids)
        if each._was_loaded.is_set() and not loaded:
            assert length >= sure, f"a wake ends with {length} tokens here of {sure} that are saved"
        if each.done and entry is not None and self.budgets.get("device_budget") == PLENTY:
            self.memory.drain()
            runs = [run for table in entry.sequence.tables.values() for run in table.resolve()]
            assert all(run.state is not State.HOST for run in runs), "a wake has left blocks on the host"

    def _in_use(self) -> list[Any]:
        """What is on the device of what caches continue."""
        assert self.store is not None
        with self.memory.lock:
            tables = [x for each in self.store._kept.parked.sequences if each.users for x in each.tables.values()]
            return [run for table in tables for run in table.resolve() if run.state in RESIDENT]

    def drop(self) -> None:
        """Give up what is kept of some tokens, which are computed again when they are needed."""
        assert self.store is not None
        store, rng = self.store, self.rng
        known = [x for x in self.kept if x.here and len(x.ids) > 1]
        if known and rng.random() < 0.8:
            each = max(rng.sample(known, min(len(known), 3)), key=lambda x: len(x.ids))
            row, salt = list(each.ids), each.key[-1]
        else:
            row, salt = rng.choice(self.histories), None
        if len(row) > 1:
            self.drop_of(row, self.key(salt), lambda start, stop: store.drop(row, start, stop, salt=salt))

    def drop_of(self, row: list[int], key: Any, run: Callable[[int, int], None]) -> None:
        """Give up some of these tokens. Those before and behind are used again."""
        assert self.store is not None
        rng = self.rng
        start = rng.randrange(rng.choice((len(row), len(row) // 2 + 1)))
        stop = rng.randint(start + 1, min(start + rng.choice((1, 1, 8, LONGEST)), len(row)))
        self.note("drop:", row, start, stop)
        there = any(x.here and x.key == key and x.ids[: len(row)] == row for x in self.kept)
        whole = not len(self.store._kept._behind)
        run(start, stop)
        self.pinned.clear()
        for each in list(self.kept):
            if each.key == key and _alike(each.ids, row) > start:
                if each.saved:
                    self.kept.append(Kept(key, each.ids, here=False, saved=True))
                each.ids = each.ids[:start]
        size = self.options["block_size"]
        behind = len(row) - 1 - -(-stop // size) * size
        calm = not (self.tight or self.flipped or self.depth) and self.plain and "transfers" not in self.on
        if there and whole and calm and behind >= columns.LEAST_BEHIND and rng.random() < 0.6:
            self.note("behind:", behind)
            # A fork may still have dropped tokens, and end so near the row's end that no forward is made for the rest.
            least = min(start + behind, len(row) - columns.LEAST_BEHIND)
            with self.alone():
                self.ask(row, rng.choice((1, 2)), salt=key[-1], at_least=least)

    def pass_time(self) -> None:
        """Nothing happens for a while; or the clock is set."""
        clock = _TIME.clock
        assert clock is not None
        clock.sleep(self.rng.choice((1.0, 100.0, 1e4, 1e6)))
        if self.rng.random() < 0.3:
            clock.wrong += self.rng.choice((-1e6, -100.0, 100.0))
        self.note("time:", clock.now, clock.wrong)

    def meanwhile(self) -> None:
        """Between two layers of a forward, other threads have their turn."""
        rng = self.rng
        if rng.random() > 0.12 or self.depth > 2 or self.store is None:
            return
        if self.on.get("interrupts", 0.0) > rng.random():
            self.note("interrupted")
            raise Interrupted
        if self.disk.killing and rng.random() < 0.2:
            self.disk.kill()
        those = (self.save_some, self.turn, self.park, self.press, self.waken, self.waken, self.wake)
        what = rng.choice((*those, self.clear, self.verify, self.drop))
        if what in (self.clear, self.verify, self.drop) and rng.random() < 0.7:
            return
        before, self.interruptible = self.interruptible, False
        self.depth += 1
        try:
            if what == self.turn and self.store._waker._loading is not None:
                self.turn(NOBODY)  # a turn waits for what is read for it: in one thread it would wait for ever
            else:
                what()
        finally:
            self.depth -= 1
            self.interruptible = before

    def park(self) -> None:
        """Somebody goes away for a while."""
        assert self.store is not None
        self.note("park")
        row = self.rng.choice(self.histories)
        self._may_fail(lambda: self.store.park(row))  # type: ignore[union-attr]
        if self.rng.random() < 0.5 and not self.depth:
            self.wake(row)

    def _may_fail(self, run: Callable[[], Any]) -> None:
        try:
            run()
        except (KVTierError, Interrupted) as error:
            self.note("raised:", type(error).__name__, error)
            self._expected(error)

    def clear(self) -> None:
        """Drop all."""
        assert self.store is not None
        self.note("clear")
        self.store.clear()
        self.cleared += 1
        self.pinned.clear()
        for each in self.kept:
            each.here = False
        if self.folder is not None and not self.depth:
            self.wake_up()

    def verify(self) -> None:
        """Compute what is kept again."""
        assert self.store is not None
        self.note("verify")
        self._may_fail(lambda: self.store.verify(2))  # type: ignore[union-attr]

    def press(self) -> None:
        """Others use the memory; what is kept gives room."""
        rng = self.rng
        what = rng.choice(("guest", "guest", "guest", "give", "resize"))
        if what == "guest" or not self.tight:
            if len(self.guests) < 3 and rng.random() < 0.3:
                self.guests.append(Guest(self))
            if self.guests:
                guest = rng.choice(self.guests)
                self.note("guest:", guest.length)
                guest.step()
        elif what == "give":
            assert self.store is not None
            nbytes = rng.randrange(1, 20_000)
            self.note("give:", nbytes)
            with self.memory.lock:
                self.store._kept.parked.give(nbytes)
        else:
            given: dict[str, Any] = {"host_budget": rng.choice(self.host_budgets)}
            if self.tiers:
                given["device_budget"] = rng.choice(self.device_budgets)
            self.note("resize:", given)
            self._may_fail(lambda: self.memory.resize(**given))

    def flip(self) -> None:
        """A bit of what is kept in host memory turns over."""
        assert self.store is not None
        self.memory.drain()
        runs = [x for s in self.store._kept.parked.sequences for table in s.tables.values() for x in table.resolve()]
        runs = [x for x in dict.fromkeys(runs) if x.state in (State.HOST, State.BOTH) and x.sums is not None]
        if not runs:
            return
        run = self.rng.choice(runs)
        assert run.host is not None
        data = run.blocks.pools.host.bytes(run.host + self.rng.randrange(run.count), 1)
        at = self.rng.randrange(len(data))
        data[at] ^= 1 << self.rng.randrange(8)
        self.flipped = True
        self.pinned.clear()
        for each in self.kept:
            each.here = False
        self.note("flip")

    def rot(self) -> None:
        """A file is damaged, or some are, and perhaps read by another process."""
        assert self.folder is not None
        if self.rng.random() < 0.5:
            self.drained()
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            self.damaged = True
            for each in self.kept:
                each.saved = False
            some = self.rng.sample(files, self.rng.choice((1, len(files))))
            self.note("rot:", [self.disk.rot(file) for file in some])
            if self.rng.random() < 0.7:
                self.restart()

    def kill(self) -> None:
        """The process may end at any moment from now on, or now."""
        self.disk.power = "power" in self.faults and (self.rng.random() < 0.5 or "kills" not in self.faults)
        if self.rng.random() < 0.3:
            self.disk.kill()
        self.disk.killing = self.rng.choice((0.02, 0.1))

    def toggle(self) -> None:
        """Faults begin, or stop."""
        rng = self.rng
        if self.on or self.disk.failing:
            self.note("faults: off")
            self.on.clear()
            self.set_disk(0.0)
            return
        for name, most in (("transfers", 0.3), ("interrupts", 0.5)):
            if name in self.faults:
                self.on[name] = most * rng.random()
        if "disk" in self.faults:
            self.set_disk(rng.choice((0.02, 0.1, 1.0)))
        self.note("faults:", self.on, self.disk.failing)

    def set_disk(self, failing: float) -> None:
        """How often calls of the system fail."""
        self.disk.failing = failing
        if failing:
            for each in self.kept:
                each.saved = False

    def adapt(self) -> None:
        """Another adapter."""
        self.toy.adapter.disable_adapters = self.rng.random() < 0.5
        self.note("adapter:", computed_as(self.toy))

    def train(self) -> None:
        """Other weights: nothing is kept, and from then on nothing saved."""
        self.note("train")
        self.pinned.clear()
        self.set_weight(self.weight + self.rng.choice((0, 1)))
        for each in self.kept:
            each.here = False

    def step(self) -> None:
        """One thing."""
        folder = self.folder is not None
        waits = self.store is not None and len(self.store.conversations._soon._waiting) > 0
        weights: dict[Callable[[], None], float] = {
            self.turn: 7.0,
            self.chat: 4.0 if self.tight else 2.5,
            self.save_some: (1.0 + 9.0 * waits) * folder,
            self.drained: 0.4 * folder,
            self.park: 0.5,
            self.wake: 0.8,
            self.waken: 2.5 * (self.store is not None and len(self.store._waker._queue) > 0),
            self.drop: 0.7,
            self.pass_time: 0.3,
            self.press: 2.5 if self.tight else 0.4,
            self.clear: 0.2,
            self.verify: 0.2,
            self.adapt: 0.3,
            self.train: 0.05,
            self.restart: 0.5 if folder else 0.1,
            self.toggle: 2.0 if self.faults & {"transfers", "interrupts", "disk"} else 0.0,
            self.flip: 2.0 * ("flips" in self.faults),
            self.rot: 1.5 * ("rot" in self.faults and folder),
            self.kill: 1.5 * (not self.faults.isdisjoint(("kills", "power")) and folder),
        }
        often = [n * some for n, some in zip(weights.values(), self.often, strict=False)]
        self.rng.choices(list(weights), often)[0]()

    def run(self, steps: int) -> None:
        """So many things, and an end at which everything drains."""
        self.survive(self.open)
        for _ in range(steps):
            self.survive(self.step)
            self.survive(self.check)
        self.survive(self.end)

    def survive(self, what: Callable[[], None]) -> None:
        """Go on as another process where this one is killed."""
        try:
            what()
        except Killed:
            while True:
                try:
                    self.died()
                    return
                except Killed:
                    continue

    def check(self) -> None:
        """All counts agree and no budget is exceeded."""
        if self.failed is not None:
            raise self.failed
        assert self.store is not None
        if not self.flipped:
            self.store.check_integrity()
            for guest in self.guests:
                guest.cache.check_integrity()
        stats = self.memory.stats
        for tier in (stats.device, stats.host):
            assert tier.bytes <= tier.budget, "a budget is exceeded"
        archive = archive_of(self.store)
        self._check_pinned()
        assert self.store.stats.state_bytes <= self.options.get("state_budget", PLENTY), "states exceed their budget"
        if archive is not None:
            archive.disk.check_integrity()
            assert self.folder is not None
            if self.disk_budget is not None:
                taken = sum(x.stat().st_size for x in os.scandir(self.folder) if ".safetensors" in x.name)
                assert taken <= self.disk_budget, f"{taken} bytes are on the disk"

    def _check_pinned(self) -> None:
        """What is pinned stays."""
        assert self.store is not None
        if self.store._weights != dependence.weights_version(self.toy):
            return  # the next call drops all of it
        archive = archive_of(self.store)
        for name, chat in self.chats.items():
            found = self.store._kept.ranks._ranked.get(name)
            unread = name in self.store.conversations._unread  # its rank holds on the disk only
            assert (found is None) == (chat.rank == DEFAULT or unread), "a conversation has no rank, or one for none"
            if found is None or not chat.rank.pinned or (not self.plain and "state_budget" in self.options):
                continue
            where, saved = (found.key, found.ids), 0
            place = disk_key(found.key)
            if archive is not None and not self.rough_disk and place is not None:
                saved, _ = archive.find(place, found.ids, stateful=not self.plain)
            # What is behind a gap may begin within what precedes it.
            here = len({i for x, tokens in found.has.items() for i in range(x.start, x.start + tokens)})
            before = self.pinned.get(name)
            if before is not None and before[0] == where and not self.flipped:
                assert here >= before[1], "what is pinned has left the memory"
                assert saved >= before[2] or self.rough_disk, "what is pinned has left the disk"
            self.pinned[name] = where, here, saved

    # The end

    def end(self) -> None:
        """Faults stop: everything drains, and a later process has all of it."""
        self.note("end")
        self.over = True
        self.toy.meanwhile = lambda: None
        self.on.clear()
        self.set_disk(0.0)
        self.disk.killing = 0.0
        assert self.store is not None
        self.set_weight(self.weight)
        if self.changed_weights:
            self.restart()
        last = [row for row in self.histories[-1:] if len(row) > 1]
        asked: list[list[int]] = []
        for row in last:
            self.note("last:", row)
            if self.ask(row, 1):
                asked.append(row)
        chats = self._said()
        files = self.folder
        self.drained()
        if files is not None:
            disk = self.store._disk_tier.disk  # type: ignore[union-attr]
            disk.problem = ""
            problem = self.disk_budget is None and not self.tight and not self.flipped
            for row in asked if problem else ():
                if self.plain:
                    got, _ = disk.find(disk_key((computed_as(self.toy), None)), packed(row))  # type: ignore[arg-type]
                    assert got == len(row), f"{got} of {len(row)} tokens are saved: {self.store.stats.problem}"
        self.close()
        if files is None:
            return
        rows = {int(x.name[:12]) for x in os.scandir(files) if ".safetensors" in x.name}
        self.tight, self.host_budgets, self.device_budgets = False, (PLENTY,), (PLENTY,)
        self.faults.clear()
        self.open()
        assert self.store is not None
        disk = self.store._disk_tier.disk  # type: ignore[union-attr]
        assert not rows.difference(disk._chunks.numbers) or self.rough_disk or rows.issuperset(disk._chunks.numbers)
        assert self._said() == chats
        for row in asked:
            self.note("again:", row)
            assert self.ask(row, self.rng.choice((1, 1, 2))), "what was saved is of no use"
        self.check()
        self.close()

    def ask(self, row: list[int], tokens: int, salt: Any = None, at_least: int = 0) -> bool:
        """Some more tokens."""
        ids, options = torch.tensor([row]), {"max_new_tokens": tokens}
        return self.call(
            lambda store: store.generate(ids, attention_mask=torch.ones_like(ids), salt=salt, **options).tolist(),
            [row],
            salt,
            options,
            at_least,
        )


def _mostly(ids: bytes, row: bytes) -> bool:
    """Whether half of what is woken is the beginning of a turn."""
    return 2 * common(ids, row) * WIDTH >= len(ids)


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def folder() -> Path:
    """A new one for a world, in memory where the system has that."""
    memory = "/dev/shm"
    return Path(tempfile.mkdtemp(prefix="kvtier-world-", dir=memory if os.access(memory, os.W_OK) else None))


def handles() -> list[str]:
    """Of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


class _Time:
    """Stands in for the module `time` in kvtier: the clock of the world that there is."""

    clock: Clock | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(time if self.clock is None else self.clock, name)


def archive_of(store: ConversationStore | None) -> Archive | None:
    """Of a store with a folder."""
    return None if store is None or store._disk_tier is None else store._disk_tier._archive


def _choose(_: LoadOrCompute, saved: SavedPrefix) -> int:
    """What is expected to be soonest: anything."""
    ways = [0, saved.length]
    if saved.step is not None:
        ways += range(max(-(-saved.past // saved.step), 1) * saved.step, saved.length, saved.step)
    return _TIME.clock.random.choice(ways)


@contextlib.contextmanager
def worlds() -> Iterator[None]:
    """What kvtier sees of the process while worlds run. They say when garbage is collected."""
    collects = gc.isenabled()
    with pytest.MonkeyPatch.context() as patch, rough():
        for name, module in list(sys.modules.items()):
            if name.startswith("kvtier.") and vars(module).get("time") is time:
                patch.setattr(module, "time", _TIME)
        patch.setattr(Archive, "background", False)
        patch.setattr(Soon, "background", False)
        patch.setattr(Waker, "background", False)
        patch.setattr(Tail, "background", False)
        patch.setattr(LoadOrCompute, "choose", _choose)
        patch.setattr(Disk, "clock", staticmethod(lambda: _TIME.time()))
        patch.setattr(ahead, "_submit", lambda *args: None)  # there is no thread to be had
        # What host threads took is measured where no clock can be given.
        patch.setattr(Future, "seconds", property(lambda future: _TIME.perf_counter() % 1e-3))
        # The machine's memory is looked up in files, and is another one each time.
        patch.setattr(system, "free_host_memory", lambda *args: 2**36)
        patch.setattr(system, "total_host_memory", lambda *args: 2**36)
        # As many of all as there are in longer sequences.
        patch.setattr(retention, "TOKENS", 8)
        patch.setattr(prefix_reuse, "SPACING", 8)
        for module in (kept, prefix_reuse):
            patch.setattr(module, "MOST_STATES", 3)
        patch.setattr(columns, "LEAST_BEHIND", 3)
        patch.setattr(wake, "PIECE", 2000)
        patch.setattr(names, "MOST_IDLE", 1)
        patch.setattr(archive, "LARGEST", 3000)
        tried = trials.tried_states

        def once(model: Any) -> trials.StatesTrial:
            """It is tried for every store, and the same each time."""
            if "tried" not in vars(model):
                vars(model)["tried"] = tried(model)
            found: trials.StatesTrial = vars(model)["tried"]
            return found

        patch.setattr(trials, "tried_states", once)
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # as for any test: what is loaded by now stays
            if collects:
                gc.enable()


_TIME = _Time()


@contextlib.contextmanager
def current(world: World) -> Iterator[None]:
    """This is the world that kvtier sees."""
    drawn = random.getstate()
    _TIME.clock, Rough.disk = Clock(random.Random(world.seed + 3)), world.disk
    random.seed(world.seed)
    torch.manual_seed(world.seed)
    try:
        yield
    finally:
        _TIME.clock = Rough.disk = None
        random.setstate(drawn)


def run(seed: int, steps: int | None = None, say: Callable[[str], None] | None = None) -> World:
    """The world of a seed, from its beginning to its end. Within `worlds`."""
    at = folder()
    gc.freeze()  # what is there already takes no time when garbage is collected
    opened, begun = Counter(handles()), set(threading.enumerate())
    try:
        world = World(seed, at, say)
        with current(world):
            world.run(world.rng.randint(5, 14) if steps is None else steps)
            world.toy.meanwhile = world.disk.idle = lambda: None
            gc.collect()
            # What was there before may have ended meanwhile: a store that an earlier test dropped ends when garbage is
            # collected, its threads soon after, and its handles with them.
            assert not (left := Counter(handles()) - opened), f"handles are left: {sorted(left.elements())}"
            assert not (threads := set(threading.enumerate()) - begun), f"threads are left: {threads}"
        return world
    finally:
        shutil.rmtree(at, ignore_errors=True)


def main() -> None:
    """Say what happens in the worlds of some seeds."""
    torch.set_num_threads(1)
    for seed in map(int, sys.argv[1:]):
        print(f"seed {seed}")
        began = time.perf_counter()
        with worlds():
            world = run(seed, say=print)
        print(f"seed {seed}: {time.perf_counter() - began:.3f} s, {world.did}")


if __name__ == "__main__":
    main()
