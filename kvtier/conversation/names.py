"""`Conversations`: the conversations of a store, by name, and what follows where one goes on."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from kvtier.conversation import records
from kvtier.conversation.conversation import Conversation, Store
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows.pieces import Written
from kvtier.conversation.given.arguments import check_name
from kvtier.conversation.kept.ranks import Ranks
from kvtier.conversation.saved.soon import Soon
from kvtier.errors import BudgetError, ClosedError, ConfigError
from kvtier.eviction.rank import DEFAULT, Rank
from kvtier.forks import heed, inherited
from kvtier.hf.models.identity import dependence
from kvtier.memory.tiered import TieredMemory

_LOG = logging.getLogger("kvtier.conversation")
#: Conversations that nobody holds and that stay in memory as they are, so that who opens one for each turn reads none.
MOST_IDLE = 32
#: Conversations that a warning names.
MOST_NAMED = 5


class OtherSaltError(ConfigError):
    """A conversation is asked for with another salt than it has."""


class _Ref(weakref.ref[Conversation]):
    """A conversation that whoever opened it may drop, and its name."""

    __slots__ = ("said",)

    said: str

    @property
    def name(self) -> str:
        """Of the conversation; "": an interrupt came before it was said."""
        return getattr(self, "said", "")


class _Known(NamedTuple):
    """A conversation that is in memory.

    Attributes:
        chat: the object that whoever opens it gets.
        says: the attributes of that object, which outlive it.
    """

    chat: _Ref
    says: dict[str, Any]


class Conversations:
    """Which conversations a store has, and which of them are in memory. What is kept of one that goes on has its rank.

    One that was saved has its rank on the disk from the opening on, and in memory from when it is read first; where it
    is pinned and what running calls were promised leaves no room for that, from the next time that somebody asks for it
    or that it goes on.

    As long as somebody holds a conversation, whoever opens it gets the same object. Of one that nobody holds, what it
    says stays. When more than `MOST_IDLE` are like that, the one that was dropped first is put away: it is saved, and
    of it the name stays in memory; where it is blank and was never saved, nothing does. One that cannot be saved stays
    in memory: without a folder, under a salt that is not saved, or as long as the disk fails. Where it could
    never be saved, its token ids are packed there.

    Args:
        store: of them, which is not kept alive.
        memory: whose lock is taken. Nobody waits for a disk under it: calls need it.
        disk: where they are saved; None: nowhere.
        ranks: of them; whose name is forgotten has none.

    Attributes:
        lock: taken before the memory's, by who saves, reads or forgets a conversation: what is forgotten stays so.

    Raises:
        ConfigError: what is saved cannot be read.
    """

    def __init__(self, store: Store, memory: TieredMemory, disk: Disk | None, ranks: Ranks) -> None:
        self._store = weakref.ref(store)
        self._memory = memory
        self._disk = disk
        self._ranks = ranks
        self._known: dict[str, _Known | None] = {}  # None: it is saved, and not in memory
        # Those with a rank of their own, or perhaps with one, that do not have it in memory yet.
        self._unread = set[str]()
        # Of these, those whose pin has found no room, which the log has.
        self._refused = set[str]()
        # Of `_unread`, those that the folder does not know the rank of.
        self._unranked: list[str] = []
        if disk is not None:
            names = disk.names()
            self._known = dict.fromkeys(names)
            self._unread = {name for name, rank in names.items() if rank != ""}
            self._unranked = disk.rank_saved(names)
        self.lock = threading.RLock()
        heed(self)
        self._here = threading.local()  # of each thread: what the model was in its last call
        self._soon = Soon()
        # Of objects that ended. Nothing else may be done where an object ends, which is at any line of any thread.
        self._dropped: deque[weakref.ref[Conversation]] = deque()
        # Of these, in order, what is in memory still.
        self._idle: OrderedDict[str, _Ref] = OrderedDict()

    def forked(self) -> None:
        """As of `Inherited`: a thread that is not here may save under the lock."""
        self.lock = inherited(self.lock, threading.RLock)

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        with self._memory.lock, self._memory.change:
            return list(self._known)

    def has(self, chat: Conversation) -> bool:
        """Whether a conversation is the one of its name: not closed, nor forgotten."""
        known = self._known.get(chat.name)
        return known is not None and known.chat() is chat

    # Open

    def open(self, made: Conversation, new: bool) -> Conversation:
        """The conversation of a name: where there is none, `made`, from then on. Otherwise see
        `ConversationStore.open`."""
        name = made.name
        while True:
            found = self.find(name)
            with self._memory.lock, self._memory.change:
                if name in self._known and self._known[name] is None:
                    continue  # it was put away meanwhile
                found = self._opened(name)
                if found is not None and new:
                    raise ConfigError(f"There is a conversation {name!r} already.")
                if found is not None and found.salt != made.salt:
                    raise OtherSaltError(f"Conversation {name!r} has another salt.")
                return self._add(made) if found is None else found

    def add(self, made: Conversation) -> None:
        """A conversation that has a history already is that of its name.

        Raises:
            ConfigError: as of `ConversationStore.open`, where `new`.
        """
        check_name(made.name)
        self.let_go()
        self.open(made, True)

    def find(self, name: str) -> Conversation | None:
        """The conversation of a name, read now if it is not in memory; None: there is none.

        Raises:
            ConfigError: it cannot be read now.
        """
        with self._memory.lock, self._memory.change:
            if name not in self._known or self._known[name] is not None:
                found = self._opened(name)
                if found is not None and name in self._unread:
                    self._rank_unread(found, self._computed_as, records.ranked_ids(found))
                return found
        with self.lock:
            with self._memory.lock, self._memory.change:
                if name not in self._known or self._known[name] is not None or self._disk is None:
                    return self._opened(name)
            written = Written()
            state = self._disk.conversation(name, written)
            with self._memory.lock, self._memory.change:
                if state is None:
                    self._gone(name)
                    return None
                chat = self._add(records.conversation_of(self._owner, name, state, written))
                if name in self._unread:
                    self._rank_unread(chat, self._computed_as, records.ranked_ids(chat))
                return chat

    def _gone(self, name: str) -> None:
        """Nothing of a conversation can be read: it is damaged."""
        self._known.pop(name, None)
        self._unread.discard(name)
        self._refused.discard(name)
        self._ranks.forget(name)  # it was in memory before

    def _rank_unread(self, chat: Conversation, computed_as: Hashable, ids: bytes) -> None:
        """A conversation that was saved has its rank in memory. A pin takes nothing that running calls were promised,
        as where a user sets it; but whoever only opens it hears of no error and waits for nobody, and the next one
        tries again."""
        try:
            self._ranks.rank(chat.name, (computed_as, chat.salt), ids, chat.rank, concede=False)
            self._unread.discard(chat.name)
            self._refused.discard(chat.name)
        except BudgetError as error:
            self._unread.add(chat.name)
            if chat.name not in self._refused:
                self._refused.add(chat.name)
                _LOG.warning("%r is pinned on the disk, and in memory once there is room: %s", chat.name, error)

    def says(self, name: str) -> dict[str, Any]:
        """What a conversation says, its `ids` and `salt` among that; nothing, if there is none. One that is not in
        memory does not come there.

        Raises:
            ConfigError: it cannot be read now.
        """
        with self.lock:
            with self._memory.lock, self._memory.change:
                known = self._known.get(name)
                if known is not None:
                    return dict(vars(known.chat() or records.again(known.says)))
            return (self._disk and name in self._known and self._disk.conversation(name)) or {}

    @property
    def _owner(self) -> Store:
        store = self._store()
        assert store is not None, "who calls has it"
        return store

    def _opened(self, name: str) -> Conversation | None:
        """The object of a conversation that is in memory."""
        known = self._known.get(name)
        if known is None:
            return None
        return known.chat() or self._add(records.again(known.says))

    def _add(self, chat: Conversation) -> Conversation:
        """This is the conversation of its name now."""
        ref = _Ref(chat, self._dropped.append)
        ref.said = chat.name
        self._known[chat.name] = _Known(ref, vars(chat))
        return chat

    # Go on

    def generated(self, computed_as: Hashable) -> None:
        """This thread's call ends, and the model was this."""
        self._here.computed_as = computed_as

    def changed(self, chat: Conversation, *, generated: bool = False) -> None:
        """A conversation went on, by this thread's last call or in another way: its history has its rank, and what it
        is is saved. Nothing, if its name was forgotten meanwhile."""
        with self.lock:
            self._follow(chat, self._here.computed_as if generated else self._computed_as)
            self._save(chat)

    def went_on(self, chat: Conversation) -> None:
        """The same, by an engine, whose steps wait for no disk: what the conversation is is saved soon."""
        self._follow(chat, self._computed_as)
        if self._disk is not None:
            self._soon.put(chat, functools.partial(self._save, chat))

    def _follow(self, chat: Conversation, computed_as: Hashable) -> None:
        """The history of a conversation has its rank."""
        ids = records.ranked_ids(chat)
        with self._memory.lock, self._memory.change:
            if not self._owner.closed and self.has(chat):
                if chat.name in self._unread:  # its pin was refused, and the call that had room for it has given it up
                    self._rank_unread(chat, computed_as, ids)
                else:
                    self._ranks.follow(chat.name, (computed_as, chat.salt), ids, chat.rank)
            elif not self._owner.closed and chat.name not in self._unread:
                self._rank_again(chat.name, computed_as)

    def _rank_again(self, name: str, computed_as: Hashable) -> None:
        """A call has ended whose conversation was forgotten meanwhile. Another one of its name has its rank on its own
        history, and not on what that call has computed."""
        known = self._known.get(name)
        if known is not None:
            other = known.chat() or records.again(known.says)
            self._ranks.follow(name, (computed_as, other.salt), records.ranked_ids(other), other.rank)
        elif name in self._known:  # it is read when somebody asks for it
            self._ranks.forget(name)
            self._unread.add(name)

    def rank(self, chat: Conversation, was: Rank) -> None:
        """A conversation has another rank than it had. Raises BudgetError, see `Conversation.pinned`."""
        key, ids = (self._computed_as, chat.salt), records.ranked_ids(chat)
        with self._memory.lock, self._memory.change:
            if chat.name in self._unread and was.pinned and chat.rank.pinned:  # a pin is not what is asked for now
                self._rank_unread(chat, key[0], ids)
            else:
                self._ranks.rank(chat.name, key, ids, chat.rank)
                self._unread.discard(chat.name)
                self._refused.discard(chat.name)
        self.changed(chat)

    def rank_saved(self) -> None:
        """Let conversations that were saved with a rank of their own have it on the disk, whose rows do not say enough:
        they are read, and none stays in memory. There each has its rank from when somebody asks for it, see `find`.

        Raises:
            ConfigError: one cannot be read now.
        """
        if self._disk is not None and self._unranked:
            read = list[str]()
            for name in self._unranked:
                state = self._disk.conversation(name)
                if state is None:
                    with self._memory.lock, self._memory.change:
                        self._gone(name)
                else:
                    chat = records.conversation_of(self._owner, name, state, Written())
                    self._disk.rank(name, chat.salt, records.ranked_ids(chat), chat.rank, chat.used)
                    read.append(name)
            self._disk.note_ranks(read)  # of the others the rows stay as they are: what a row says may be read later
            self._unranked = []

    @property
    def _computed_as(self) -> Hashable:
        """What the model is now."""
        return dependence.computed_as(self._owner.model)

    # Save

    def _save(self, chat: Conversation) -> None:
        """What a conversation is is saved, if later processes can know its salt, and its history there has its rank.
        Nothing, if its name was forgotten."""
        with self.lock:
            if self._disk is None or self._owner.closed or not self.has(chat):
                return
            self._disk.rank(chat.name, chat.salt, records.ranked_ids(chat), chat.rank, chat.used, waits=True)
            if records.can_be_saved(chat):
                self._disk.save_conversation(chat.name, records.record_of(chat), chat.written)

    def _save_as_it_is(self, chat: Conversation, disk: Disk) -> bool:
        """Save what a conversation is that has not gone on: its user may have changed it. Whether the disk took it."""
        disk.rank(chat.name, chat.salt, records.ranked_ids(chat), chat.rank, chat.used)
        return disk.save_conversation(chat.name, records.record_of(chat), chat.written)

    def save_all(self) -> list[str]:
        """Save all that are in memory: their users may have changed them. The names of those that the disk did not
        take."""
        if self._disk is None:
            return []
        self._soon.join()
        lost = list[str]()
        for name in self.names:
            with self.lock:
                chat = self._in_memory(name)
                if chat is None or not records.can_be_saved(chat):
                    continue
                is_new = records.is_blank(chat) and not chat.written.was_saved
                if not self._save_as_it_is(chat, self._disk) and not is_new:
                    lost.append(name)
        self.let_go()
        return [] if self._disk.is_inherited else lost

    def note_ranks(self) -> None:
        """Let the rows of those that are in memory say where their histories end, now that nothing waits to be saved: a
        turn that was cut short may wait for no chunk."""
        ranked = list[str]()
        for name in self.names if self._disk is not None else ():
            with self.lock:
                chat = self._in_memory(name)
                if self._disk is not None and chat is not None and chat.rank != DEFAULT:
                    self._disk.rank(name, chat.salt, records.ranked_ids(chat), chat.rank, chat.used)
                    if chat.written.digest is not None:  # else its row may be of another history, or of another rank
                        ranked.append(name)
        if self._disk is not None:
            self._disk.note_ranks(ranked)

    def _in_memory(self, name: str) -> Conversation | None:
        """A conversation, as it is; None: it is not in memory. Nobody keeps it."""
        with self._memory.lock, self._memory.change:
            known = self._known.get(name)
            return None if known is None else known.chat() or records.again(known.says)

    # Let go

    def let_go(self) -> None:
        """Put away what nobody has held for longest; see the class."""
        if not self._dropped and len(self._idle) <= MOST_IDLE:
            return
        lock = self.lock
        if lock._is_owned():  # type: ignore[attr-defined]
            return  # as below
        try:
            if not lock.acquire(blocking=False):
                return  # somebody saves: who opens a conversation next does it, and does not wait for the disk either
            while self._dropped:
                ref = self._dropped[0]
                assert isinstance(ref, _Ref)
                with self._memory.lock, self._memory.change:
                    known = self._known.get(ref.name)
                    if known is not None and known.chat is ref:
                        self._idle[ref.name] = ref
                        self._idle.move_to_end(ref.name)
                self._dropped.popleft()  # last: what is cut short is done again
            while len(self._idle) > MOST_IDLE:
                name = next(iter(self._idle))
                if not self._put_away(name, self._idle[name]):
                    break  # the disk fails: the next one tries again
                self._idle.pop(name, None)
        finally:
            if lock._is_owned():  # type: ignore[attr-defined]  # an interrupt may come before it is and behind that
                lock.release()

    def _put_away(self, name: str, ref: _Ref) -> bool:
        """Let a conversation leave the memory, if that loses nothing. Whether there is no more to do."""
        known = self._known.get(name)
        if known is None or known.chat is not ref:
            return True  # it was opened again, or closed
        chat = records.again(known.says)
        is_new = records.is_blank(chat) and not chat.written.was_saved
        if not is_new:
            if self._disk is None or not records.can_be_saved(chat):
                records.pack(known.says)
                return True
            if not self._save_as_it_is(chat, self._disk):
                return False
        with self._memory.lock, self._memory.change:
            if self._known.get(name) is known:  # nobody has opened it meanwhile
                if is_new:
                    del self._known[name]
                else:
                    self._known[name] = None
        return True

    # Forget

    def forget(self, name: str) -> None:
        """See `ConversationStore.forget`."""
        with self.lock:  # nobody reads it meanwhile
            with self._memory.lock, self._memory.change:
                found = self._opened(name)
            if found is not None:
                found.close()
            else:
                self._drop(name)  # of one that is damaged, too, what is kept aside

    def remove(self, chat: Conversation) -> None:
        """A conversation is closed: its name is free. May be done again where it was cut short.

        Raises:
            ClosedError: it is saved, and stays so: the store was closed.
        """
        with self.lock:
            if self._disk is not None and self._owner.closed and chat.written.was_saved:
                raise ClosedError(
                    f"Conversation {chat.name!r} is saved in {self._disk.path}, and its store was closed. Open the "
                    "folder again and `forget` it."
                )
            if chat.name not in self._known or self.has(chat):  # else another one has that name by now
                self._drop(chat.name)

    def _drop(self, name: str) -> None:
        if self._disk is not None and not self._owner.closed:
            self._disk.drop_conversation(name)
            self._soon.put(self._disk, self._disk.clear_log)
        with self._memory.lock, self._memory.change:
            self._known.pop(name, None)
            self._idle.pop(name, None)
            self._unread.discard(name)
            self._refused.discard(name)
            self._ranks.forget(name)


def what_is_lost(names: Sequence[str], disk: Disk) -> str:
    """What to say of conversations that the disk did not take when their store was closed."""
    return (
        f"Of these conversations, what was not saved in {disk.path} before is lost with this store: {_some(names)}. "
        f"{disk.problem}"
    )


def what_is_left(disk: Disk) -> str:
    """What to say of conversations that were forgotten and that the disk did not remove when their store was closed."""
    return (
        f"These conversations were forgotten, and what they said is in {disk.path} still: "
        f"{_some(sorted(disk.forgotten))}. {disk.problem}. Open the folder again, and `forget` them."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(map(repr, names[:MOST_NAMED]))}{more}"
