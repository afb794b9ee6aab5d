"""An interrupt at any line of what a store keeps account of: its tokens are right, and every count is, by the next
use; nothing is left when it is closed."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import uncollected
from test_interrupts import PACKAGE, Line
from toy import PAD, States, Toy

from kvtier import BudgetError, ConversationStore, KVTierError, TieredMemory
from kvtier.conversation.calls import columns, prefix_reuse
from kvtier.conversation.kept import kept, retention

#: Where an interrupt comes in every line: what is kept account of. Elsewhere it comes in some.
BOOKS = ("conversation/", "eviction/", "tables/parked/sequences.py", "tables/table.py", "memory/access/change.py")
#: Of these lines, as many for each act; KVTIER_TEST_LINES=1000000 asks for all.
LINES = int(os.environ.get("KVTIER_TEST_LINES", "100"))
SYSTEM = [1, 2, 3, 4, 5, 6, 1, 3, 5, 2, 4, 6]

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_host", "small")


@pytest.fixture(name="small")
def sizes_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes by in longer sequences comes by in these."""
    monkeypatch.setattr(retention, "TOKENS", 8)
    monkeypatch.setattr(prefix_reuse, "SPACING", 8)
    monkeypatch.setattr(columns, "LEAST_BEHIND", 3)
    for module in (kept, prefix_reuse):
        monkeypatch.setattr(module, "MOST_STATES", 3)


class Line_(Line):
    """An interrupt in some modules only."""

    def __init__(self, at: int, where: tuple[str, ...]) -> None:
        super().__init__(at)
        self._where = tuple(f"{PACKAGE}/{name}" for name in where)

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """Trace one event."""
        if not frame.f_code.co_filename.startswith(self._where):
            return None
        return super().__call__(frame, event, argument)


class Scene:
    """A store on a small memory, with some conversations and what they share."""

    def __init__(self, states: States, folder: Path | None) -> None:
        self.toy = Toy(random.Random(3), states)
        room = self.toy.token_bytes * 16
        self.memory = TieredMemory(device_budget=30 * room, host_budget=100 * room)
        where: dict[str, Any] = {} if folder is None else {"directory": folder}
        self.store = ConversationStore(
            self.toy, memory=self.memory, block_size=4, state_budget=1200, loading="always", **where
        )
        self.tells = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.chats = [self.store.open(name) for name in ("a", "b", "c")]
        for i, chat in enumerate(self.chats):
            self.ask(SYSTEM + [i + 1] * 9, chat=chat)
        self.chats[1].priority = 2
        self.ask([5, 4, 3, 2, 1, *SYSTEM])

    def ask(self, row: list[int], *, chat: Any = None, **options: Any) -> None:
        """A call: its tokens are right."""
        ids, options = torch.tensor([row]), {"max_new_tokens": 2, **options}
        right = self.toy.answer([row], [0], options)
        run = self.store if chat is None else chat
        out = run.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out.tolist() == right

    def end(self, act: str) -> None:
        """All counts are right, so is every token, and nothing is left."""
        memory, store = self.memory, self.store
        self.toy.meanwhile = lambda: None
        assert not memory.lock._is_owned(), "the lock is held for ever"
        if not store.closed:
            store.check_integrity()
            if act == "closing a conversation":
                self.chats[1].close()  # again, if it was cut short
            names = {x.name for x in self.chats if not x.closed}
            assert set(store.names) - names <= {"d"}
            assert names <= set(store.names)
            for chat in self.chats:
                if not chat.closed:
                    assert (chat.rank.pinned, chat.rank.priority) == self._rank(chat.name), "a rank that is none"
                    self.ask([*chat.ids, 4], chat=chat)
            store.check_integrity()
            self.ask([*SYSTEM, 6, 6])
            self.ask([5, 4, 3, 2, 1, *SYSTEM, 2])
            for each in store._kept.parked.sequences:
                assert not each.users, "nobody goes on with it"
            store.drop(self.chats[0].ids, 4, 9)
            self.ask([*self.chats[0].ids, 3])
            store.check_integrity()
            store.clear()
            self.ask(SYSTEM)
            store.check_integrity()
        store.close()
        memory.check_integrity()
        with memory.lock, memory.change:
            memory._drain()
            assert not memory.owners, "somebody is in the memory still"
            memory.trim(all_free=True)
        stats = memory.stats
        assert (stats.device.used_blocks, stats.host.used_blocks) == (0, 0)
        assert (stats.device.bytes, stats.host.bytes) == (0, 0)
        assert not memory.conceding
        assert not self.toy._forward_pre_hooks, "the model is as it was"
        memory.close()

    def _rank(self, name: str) -> tuple[bool, int]:
        found = self.store._kept.ranks._ranked.get(name)
        return (False, 0) if found is None else (found.rank.pinned, found.rank.priority)


def give(scene: Scene) -> None:
    """Others need room."""
    with scene.memory.lock, scene.memory.change:
        scene.store._kept.parked.give(40 * scene.toy.token_bytes)


def pin(scene: Scene) -> None:
    """A conversation is worth more than others, and others need room."""
    scene.chats[0].pinned = True
    give(scene)
    scene.chats[0].pinned = False


def wake(scene: Scene) -> None:
    """Parked, and woken."""
    scene.chats[0].park()
    scene.chats[0].wake()
    while scene.store._waker.step() is not None:
        scene.memory.drain()


def beams(scene: Scene) -> None:
    """Rows change."""
    scene.ask([*SYSTEM, 2, 2], num_beams=2)


def padded(scene: Scene) -> None:
    """Rows of other lengths."""
    rows = [[*SYSTEM, 3], [PAD] * 4 + SYSTEM[:9]]
    ids = torch.tensor(rows)
    scene.store.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=2)


def full(scene: Scene) -> None:
    """Calls that need the room of what is kept."""
    for i in range(6):
        with contextlib.suppress(BudgetError):
            scene.ask([i % 6 + 1, 2, *[i % 5 + 1] * 40])


def gap(scene: Scene) -> None:
    """Tokens in the middle go, and are computed again."""
    chat = scene.chats[2]
    chat.drop(5, 10)
    scene.ask([*chat.ids, 1], chat=chat)


ACTS: dict[str, Callable[[Scene], None]] = {
    "a turn": lambda scene: scene.ask([*scene.chats[1].ids, 1, 1, 4], chat=scene.chats[1]),
    "a new prompt": lambda scene: scene.ask([4, 4, 4, 4, 4, 4, 4, 4, 4]),
    "an edited history": lambda scene: scene.ask(SYSTEM[:7] + [1] * 4),
    "beams": beams,
    "a padded batch": padded,
    "giving room": give,
    "no room": full,
    "a gap": gap,
    "pins": pin,
    "a priority": lambda scene: setattr(scene.chats[0], "priority", 5),
    "a fork": lambda scene: scene.chats.append(scene.chats[0].fork("d")),
    "waking": wake,
    "clear": lambda scene: scene.store.clear(),
    "verify": lambda scene: (scene.store.verify(2), None)[1],
    "closing a conversation": lambda scene: scene.chats[1].close(),
    "close": lambda scene: scene.store.close(),
}


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Threads make their steps when they are told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtier.conversation.saved.wake.Waker.background", False)
        patch.setattr("kvtier.conversation.saved.archive.Archive.background", False)
        patch.setattr("kvtier.conversation.saved.tail.Tail.background", False)
        yield


def cut_short(name: str, states: States, at: int, where: tuple[str, ...]) -> int:
    """Cut an act short at a line. Returns how many lines were left when it ended: below 0 if there is such a line."""
    with no_threads():
        scene = Scene(states, None)
        line = Line_(at, where)
        try:
            with line.traced(), contextlib.suppress(KVTierError):
                ACTS[name](scene)
            scene.end(name)
        except BaseException as error:
            error.add_note(f"{name}: cut short at line {at}, {line.where}")
            raise
    return line.left


def lines(name: str, states: States, where: tuple[str, ...], number: int, shift: int = 0) -> list[int]:
    """Some lines of an act, evenly."""
    last = 10**6 - cut_short(name, states, 10**6, where)
    return sorted({(i * last + shift) // number for i in range(number)})


@pytest.mark.parametrize("name", ACTS)
def test_a_store_that_is_interrupted_goes_on(name: str) -> None:
    for at in lines(name, "", BOOKS, 4):
        cut_short(name, "", at, BOOKS)
    for at in lines(name, "", ("",), 3):
        cut_short(name, "", at, ("",))


@pytest.mark.parametrize("states", ["windows", "recurrent"])
@pytest.mark.parametrize("name", ["a turn", "giving room", "clear", "close"])
def test_a_store_of_a_model_with_states_that_is_interrupted_goes_on(name: str, states: States) -> None:
    for at in lines(name, states, BOOKS, 4):
        cut_short(name, states, at, BOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("states", ["", "windows", "recurrent"])
@pytest.mark.parametrize("name", ACTS)
def test_a_store_that_is_interrupted_at_many_lines_goes_on(name: str, states: States) -> None:
    for at in lines(name, states, BOOKS, LINES):
        cut_short(name, states, at, BOOKS)


@pytest.mark.parametrize("missing", ["_recover", "drop_lost"])
def test_without_what_makes_counts_right_again_one_notices(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.Kept, missing, lambda self: None)
    cuts = [(name, at) for name in ("a turn", "a new prompt") for at in lines(name, "", BOOKS, 4)]
    with pytest.raises(AssertionError):
        sum(cut_short(name, "", at, BOOKS) for name, at in cuts)


def test_an_interrupt_while_a_store_begins_leaves_its_folder_to_the_next_one(tmp_path: Path) -> None:
    """Also as long as somebody holds the error, as a notebook does."""
    toy = Toy(random.Random(3), "")

    def begin() -> ConversationStore:
        return ConversationStore(toy, host_budget=10**7, block_size=4, directory=tmp_path)

    with begin() as store:
        store.open("a", priority=2).generate(torch.tensor([SYSTEM]), max_new_tokens=2)
    for at in range(10**6):
        files = ("store.py", "names.py", "disk/disk.py", "disk/recovery.py")
        line, held = Line_(at, tuple(f"conversation/{x}" for x in files)), None
        with uncollected():
            sys.settrace(line)
            try:
                store = begin()
            except KeyboardInterrupt as error:
                held = error
            finally:
                sys.settrace(None)
            if held is None:  # it came where nobody hears of it, or not at all
                store.close()
                if line.where is None:
                    break
            with begin() as store:
                assert store.names == ["a"], line.where
        assert not toy._forward_pre_hooks
    assert at > 100
