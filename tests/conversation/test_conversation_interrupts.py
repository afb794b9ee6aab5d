"""An interrupt at any line of what is done with a conversation: each is, here and in its folder, what it was before or
what it is afterwards, and goes on with the right tokens."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_store_interrupts import Line_, no_threads
from toy import Toy

from kvtier import ConversationStore, KVTierError
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.index import common, packed
from kvtier.conversation.records import is_blank

#: Of the lines of each act, so many; KVTIER_TEST_LINES=1000000 asks for all.
LINES = int(os.environ.get("KVTIER_TEST_LINES", "100"))
OPTIONS: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
ONE, TWO, NEW = "acebacebdf", "bdfbdf", "fedcab"

pytestmark = pytest.mark.usefixtures("one_thread", "on_the_host")


class Letters:
    """A tokenizer: a token for each letter, and the role of a message as one in front of it."""

    chat_template = "letters"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **_: Any
    ) -> list[int]:
        """The ids of messages."""
        ids = [x for message in messages for x in (len(message["role"]) % 6 + 1, *self.ids(message["content"]))]
        return ids + [len("assistant") % 6 + 1] * add_generation_prompt

    @staticmethod
    def ids(text: str) -> list[int]:
        """Of the letters a to f; others have none."""
        return [ord(x) - ord("a") + 1 for x in text if x in "abcdef"]

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        """Letters."""
        return "".join(chr(int(x) + ord("a") - 1) for x in ids)


def begin(toy: Toy, folder: Path) -> ConversationStore:
    return ConversationStore(toy, host_budget=4000 * toy.token_bytes, block_size=4, directory=folder, loading="always")


def said(chat: Conversation) -> tuple[Any, ...]:
    """What a conversation is."""
    ends = dict(chat.ends)
    return list(chat.ids), [dict(x) for x in chat.messages], ends, (chat.rank.pinned, chat.rank.priority, chat.rank.ttl)


def send(chat: Conversation, text: str, toy: Toy) -> None:
    """A turn: its tokens are right."""
    chat.send(text, tokenizer=Letters(), **OPTIONS)
    check(chat, toy)


def check(chat: Conversation, toy: Toy) -> None:
    """The last answer follows from what precedes it."""
    prompt = chat.ids[:-2]
    assert toy.answer([prompt], [0], OPTIONS) == [chat.ids]


class Scene:
    """A store with a folder, and chats in it."""

    def __init__(self, folder: Path) -> None:
        self.toy, self.folder = Toy(random.Random(3)), folder
        self.store = begin(self.toy, folder)
        self.chats = {name: self.store.open(name) for name in ("a", "b")}
        for chat in self.chats.values():
            send(chat, ONE, self.toy)
        send(self.chats["a"], TWO, self.toy)
        self.store.flush()
        # What is saved next makes keys and values give way.
        room = self.disk.room
        room.count()
        room.budget = room.nbytes + room.rest + 1000

    @property
    def disk(self) -> Disk:
        """The folder."""
        assert self.store._disk_tier is not None
        return self.store._disk_tier.disk


def whole(store: ConversationStore) -> dict[str, Any]:
    """What every conversation of a store is that is no blank one."""
    found = {}
    for name in store.names:
        chat = store.find(name)
        if chat is not None and not is_blank(chat):
            found[name] = said(chat)
    return found


def unhurt(found: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Every conversation is what it was, or what it is to be."""
    for name in before.keys() | after.keys() | found.keys():
        assert found.get(name) in (before.get(name), after.get(name)), name


def goes_on(store: ConversationStore, toy: Toy) -> None:
    """Every conversation has the right tokens."""
    for name in store.names:
        send(store.open(name), NEW, toy)
    store.check_integrity()


def erased(scene: Scene, ids: bytes, others: bytes) -> None:
    """Nothing is kept of a sequence behind what another one begins with."""
    start = common(ids, others)
    assert [x for x in scene.store._kept.entries.values() if common(x.ids, ids) > start] == []
    assert scene.disk._chunks.beyond(None, ids, start) == []


def wake(scene: Scene) -> None:
    scene.chats["a"].park()
    scene.store.clear()
    scene.chats["a"].wake()
    while scene.store._waker.step() is not None:
        scene.store.memory.drain()


def paste(scene: Scene) -> None:
    """What a conversation says has grown much."""
    chat = scene.chats["b"]
    chat.messages += [{"role": "user", "content": "x" * 20_000}, {"role": "assistant", "content": "x" * 9000}]
    scene.store.conversations.changed(chat)


def rank(scene: Scene) -> None:
    scene.chats["a"].set_rank(pinned=True, priority=3, ttl=1000.0)


ACTS: dict[str, Callable[[Scene], object]] = {
    "send": lambda scene: scene.chats["a"].send("abc", tokenizer=Letters(), **OPTIONS),
    "regenerate": lambda scene: scene.chats["a"].regenerate(tokenizer=Letters(), **OPTIONS),
    "fork": lambda scene: scene.chats["a"].fork("c"),
    "rewind": lambda scene: scene.chats["a"].rewind(turns=1),
    "rank": rank,
    "open with a rank": lambda scene: scene.store.open("c", pinned=True),
    "park and wake": wake,
    "drop": lambda scene: scene.chats["a"].drop(4, 9),
    "close": lambda scene: scene.chats["a"].close(),
    "forget": lambda scene: scene.store.forget("b"),
    "erase": lambda scene: scene.store.forget("a", erase=True),
    "engine": lambda scene: scene.chats["a"].went_on([*scene.chats["a"].ids, 1]),
    "flush": lambda scene: scene.store.flush(),
    "paste": paste,
}


def cut_short(act: str, at: int, folder: Path, after: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Cut an act short at a line. How many lines were left when it ended, and what every conversation is then.

    Args:
        after: what each is after the whole act; None: that is not known yet.
    """
    with no_threads(), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        scene = Scene(folder / "chats")
        before = whole(scene.store)
        line = Line_(at, ("conversation/",))
        try:
            with line.traced(), contextlib.suppress(KVTierError):
                ACTS[act](scene)
            assert not scene.store.conversations.lock._is_owned(), "other threads wait for ever"  # type: ignore[attr-defined]
            now = whole(scene.store)
            after = now if after is None else after
            unhurt(now, before, after)
            if act == "erase" and "a" not in now:
                erased(scene, *(packed(before[name][0]) for name in ("a", "b")))
            # The process may end here. (A thread that clears the log changes files while they are copied one by one.)
            scene.store.conversations._soon.join()
            shutil.copytree(scene.folder, folder / "copy")
            with begin(scene.toy, folder / "copy") as copy:
                unhurt(whole(copy), before, after)
                goes_on(copy, scene.toy)
            if not scene.disk.closed:
                scene.disk.check_integrity()
            scene.store.close()
            with begin(scene.toy, scene.folder) as store:
                assert whole(store) == now, "what was there is not there in a later process"
                assert not store.stats.problem
                assert not store.stats.damaged
                goes_on(store, scene.toy)
        except BaseException as error:
            error.add_note(f"{act}: cut short at line {at}, {line.where}")
            raise
    return line.left, now


def cut_short_at_some(act: str, number: int, folder: Path) -> None:
    """Cut an act short at some lines, evenly."""
    left, after = cut_short(act, 10**6, folder)
    last = 10**6 - left
    for at in sorted({i * last // number for i in range(number)}):
        cut_short(act, at, folder, after)


@pytest.mark.parametrize("act", ACTS)
def test_a_conversation_that_is_interrupted_is_what_it_was_or_what_it_is_to_be(act: str, tmp_path: Path) -> None:
    cut_short_at_some(act, 2, tmp_path / "x")


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
def test_a_conversation_that_is_interrupted_at_many_lines_is_whole(act: str, tmp_path: Path) -> None:
    cut_short_at_some(act, LINES, tmp_path / "x")


def test_a_fork_that_is_interrupted_at_any_line_is_whole_or_is_not_there() -> None:
    toy = Toy(random.Random(3))
    with ConversationStore(toy, host_budget=4000 * toy.token_bytes, block_size=4) as store:
        chat, is_there = store.open("a"), list[bool]()
        send(chat, ONE, toy)
        cut = True
        while cut:
            name = f"fork {len(is_there)}"
            line = Line_(len(is_there), ("conversation/",))
            with line.traced():
                chat.fork(name)
            cut = line.where is not None
            fork = store.find(name)
            is_there.append(fork is not None)
            assert fork is None or said(fork)[:3] == said(chat)[:3], line.where
        assert set(is_there) == {False, True}
        send(store.open(name), TWO, toy)


def test_an_interrupt_while_a_conversation_that_nobody_holds_is_found_leaves_a_store_that_opens_others() -> None:
    toy, at, cut = Toy(random.Random(3)), 0, True
    with ConversationStore(toy, host_budget=4000 * toy.token_bytes, block_size=4) as store:
        send(store.open("a"), ONE, toy)
        while cut:
            line = Line_(at, ("conversation/",))
            with line.traced():
                store.find("a")
            cut, at = line.where is not None, at + 1
            send(store.open("a"), "a", toy)


def test_a_call_of_a_store_behind_an_interrupted_turn_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever `with` was interrupted, and while somebody holds the error, as a notebook does."""
    toy, turns, held = Toy(random.Random(3)), list[str | None](), list[BaseException]()
    with ConversationStore(toy, host_budget=4000 * toy.token_bytes, block_size=4) as store:
        chat, generate = store.open("a"), store._generating.generate

        def noted(*args: Any) -> Any:
            turns.append(args[-1])
            return generate(*args)

        monkeypatch.setattr(store._generating, "generate", noted)
        entered, cut = 0, True
        while cut:
            left, cut = entered, False

            def behind_enter(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal left, cut
                if frame.f_code.co_name == "__enter__" and frame.f_code.co_filename == contextlib.__file__:
                    left -= event == "return"
                    if left < 0 and not cut:
                        cut = True
                        raise KeyboardInterrupt
                return behind_enter

            before = sys.gettrace()
            sys.settrace(behind_enter)
            try:
                chat.generate(torch.tensor([[1, 2, 3, 4]]), **OPTIONS)
            except KeyboardInterrupt as error:
                held.append(error)
            finally:
                sys.settrace(before)
            store.generate(torch.tensor([[6, 5, 4, 3]]), **OPTIONS)
            assert turns.pop() is None
            entered += 1
        assert set(turns) == {"a"}
        assert len(held) > 1
