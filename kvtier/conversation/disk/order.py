"""`Order`: which of the saved chunks go first. What has expired does, then by priority what was used longest ago. What
is pinned does not go. Of a sequence the end goes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvtier.conversation.disk.chunks import Chunk, Chunks
from kvtier.conversation.disk.keys import end_of
from kvtier.conversation.disk.ranked import EXPIRED, OTHERS, PINNED, Ranked
from kvtier.conversation.disk.rows.conversations import UNREAD
from kvtier.conversation.index import WIDTH
from kvtier.eviction.rank import DEFAULT, Rank


class Tips(NamedTuple):
    """Where the saved history of a conversation ends from now on.

    Attributes:
        tips: see `Ranked`.
        waits: whether more of its history is to be saved.
        said: what its row says then, see `ConversationRows.note`; None: its row is of another history, or has another
            rank.
    """

    tips: tuple[Chunk, ...]
    waits: bool
    said: str | int | None


class Ordered(Protocol):
    """See `Chunk`."""

    number: int

    @property
    def below(self) -> Collection[Ordered]:
        """What continues it."""


C = TypeVar("C", bound=Ordered)


def going(chunks: Callable[[], Iterable[C]], level_of: Mapping[int, float]) -> Iterator[C]:
    """Chunks in the order in which they go. One goes before what it continues, whatever their levels are.

    Args:
        chunks: all of them, in the order of their use, what continues a chunk before it.
        level_of: by number, where that is not `OTHERS`.
    """
    gone = set[int]()
    for level in sorted({OTHERS, *level_of.values()} - {PINNED}):
        for chunk in chunks():
            number = chunk.number
            if level_of.get(number, OTHERS) > level or number in gone:
                continue
            if level_of and any(x.number not in gone for x in chunk.below):
                continue
            gone.add(number)
            yield chunk


class Order:
    """Which chunks of a folder go first, as conversations are ranked. Decides, and removes nothing.

    Of a conversation it knows the chunks at which its saved history ends, and no token ids, but for what is to be saved
    still: then its ids are here until that is done.

    Args:
        chunks: of the folder.
        stateful: whether what is saved is continued at ends of chunks only, where the states are. A history that is
            part of a longer one is not all saved then: its own end is to come, though it may have no tokens of its own.

    Attributes:
        others: numbers of chunks that nobody here looks for, those that are gone included: they are the first to go.
    """

    def __init__(self, chunks: Chunks, stateful: bool = False) -> None:
        self.others = set[int]()
        self._chunks = chunks
        self._stateful = stateful
        self._ranked: dict[str, Ranked] = {}
        # Salt and ids of histories of which more is to be saved.
        self._waiting: dict[str, tuple[object, bytes]] = {}

    # Ranks

    @property
    def pinned(self) -> list[str]:
        """The conversations that are pinned."""
        return [name for name, x in self._ranked.items() if x.rank.pinned]

    def get(self, name: str) -> Ranked | None:
        """A conversation with a rank of its own; None: it has that of all others."""
        return self._ranked.get(name)

    def put(self, name: str, ranked: Ranked) -> None:
        """A conversation has this rank, and these tips."""
        self._ranked[name] = ranked

    def read(self, rows: Mapping[str, str | None], now: float) -> tuple[list[str], list[str]]:
        """Conversations have the ranks, and the tips, that their rows say, see `ConversationRows.names`. Returns those
        whose row tells too little; and those that went on later than now, for the clock was set back. These count from
        now on: their rows are to say so, or each opening would begin their time to live again."""
        unread, later = list[str](), list[str]()
        for name, said in rows.items():
            ranked = Ranked.of(said, self._chunks) if said else None
            if ranked is not None:
                if ranked.used > now:
                    ranked.used = now
                    later.append(name)
                self.put(name, ranked)
            elif said != "":
                unread.append(name)
        return unread, later

    def rank(self, name: str, salt: object, ids: bytes, rank: Rank, used: float, *, waits: bool) -> None:
        """A conversation has this history and this rank now. Where its history ends is looked for.

        Args:
            waits: what is not saved of it will be.
        """
        if rank == DEFAULT:
            self.forget(name)
            return
        [(tips, is_whole)] = self._ends([(salt, ids)], self._chunks)
        if (waits or name in self._waiting) and not is_whole:
            # In one line: an interrupt between the two would leave a history of which nobody waits for the rest.
            self._ranked[name], self._waiting[name] = Ranked(rank, used, tips), (salt, ids)
        else:
            self._waiting.pop(name, None)  # first: what is waited for is of the history whose tips are known
            self._ranked[name] = Ranked(rank, used, tips)

    def forget(self, name: str) -> None:
        """A conversation has the rank of all others."""
        self._waiting.pop(name, None)
        self._ranked.pop(name, None)

    # Where histories end

    def grown(self, key: str, ids: bytes, start: int) -> dict[str, Tips]:
        """What the tips are of conversations that have waited for a chunk which was added: its sequence is this one,
        and its own tokens begin at `start`."""
        head = ids[: (start + 1) * WIDTH]
        names = [
            name for name, (salt, mine) in self._waiting.items() if mine.startswith(head) and key.endswith(end_of(salt))
        ]
        return self._found(names, self._chunks)

    def _found(self, names: Sequence[str], chunks: Chunks) -> dict[str, Tips]:
        """What the tips are of conversations that wait, among some chunks."""
        found = self._ends([self._waiting[name] for name in names], chunks)
        return {name: self._tips(name, tips, not is_whole) for name, (tips, is_whole) in zip(names, found, strict=True)}

    def _ends(
        self, histories: Sequence[tuple[object, bytes]], chunks: Chunks
    ) -> Iterator[tuple[tuple[Chunk, ...], bool]]:
        """For each of some histories, given as its salt and its ids: the tips among some chunks, and whether all of it
        is saved. Nothing is looked at for none: each chunk that is saved asks, and there may be many keys."""
        if histories:
            found = chunks.tips(histories, self.others, stateful=self._stateful)
            for (_, ids), (tips, length) in zip(histories, found, strict=True):
                yield tips, length * WIDTH >= len(ids)

    def without(self, gone: Collection[Chunk]) -> dict[str, Tips]:
        """What the tips are of conversations some of whose tips go: of a chain what is left of it."""
        numbers = {x.number for x in gone}
        found = {}
        for name, ranked in self._ranked.items():
            if any(x.number in numbers for x in ranked.tips):
                left = dict[Chunk, None]()
                for at in ranked.tips:
                    tip: Chunk | None = at
                    while tip is not None and tip.number in numbers:
                        tip = tip.parent
                    if tip is not None:
                        left[tip] = None
                found[name] = self._tips(name, tuple(left), name in self._waiting)
        return found

    def _tips(self, name: str, tips: tuple[Chunk, ...], waits: bool) -> Tips:
        ranked = self._ranked[name]
        said = None if ranked.noted is False else UNREAD if ranked.noted is None else ranked.said(tips)
        return Tips(tips, waits, said)

    def move(self, moved: Mapping[str, Tips]) -> None:
        """What the rows say by now of tips is so."""
        for name, each in moved.items():
            self._ranked[name].tips = each.tips
            if not each.waits:
                self._waiting.pop(name, None)

    def settle(self, chunks: Chunks) -> None:
        """Which chunks there are was not known, and it is these: tips are those of before that are there still.
        Histories that wait are looked for again. It may be done twice."""
        for ranked in self._ranked.values():
            there = (chunks.there(x) for x in ranked.tips)
            ranked.tips = tuple(dict.fromkeys(x for x in there if x is not None))
        self.move(self._found(list(self._waiting), chunks))

    # What goes first

    def first(self, left: int, most: int, keep: Chunk | None, clock: Callable[[], float]) -> tuple[list[Chunk], int]:
        """The chunks that go first, of `left` bytes until no more than `most` are left, and how many are; the chain of
        `keep` stays."""
        gone = list[Chunk]()
        level_of = self._levels(clock) | dict.fromkeys(self.others, EXPIRED)
        if keep is not None and level_of:
            level_of |= dict.fromkeys([x.number for x in keep.chain()], PINNED)
        for chunk in going(lambda: self._chunks, level_of):
            if left <= most:
                break
            gone.append(chunk)
            left -= chunk.kept
        return gone, left

    def expired(self, clock: Callable[[], float]) -> list[Chunk]:
        """What has not been used for its time to live, but for what others continue."""
        level_of, gone = self._levels(clock), list[Chunk]()
        if EXPIRED in level_of.values():
            for chunk in going(lambda: self._chunks, level_of):
                if level_of.get(chunk.number) != EXPIRED:
                    break
                gone.append(chunk)
        return gone

    def _levels(self, clock: Callable[[], float]) -> dict[int, float]:
        """The level of each chunk of a history with a rank: of several the highest. What has a level already has had it
        from a history of no lower one, and so has all that it continues: every chunk is looked at once."""
        if not self._ranked:
            return {}
        found, now = dict[int, float](), clock()
        each = [(x.level(now), x.tips) for x in self._ranked.values()]
        for level, tips in sorted(each, key=lambda x: x[0], reverse=True):
            for tip in tips:
                at: Chunk | None = tip
                while at is not None and at.number not in found:
                    found[at.number] = level
                    at = at.parent
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tips are there, and whoever waits has a rank. For tests and debugging."""
        for ranked in self._ranked.values():
            assert all(x in self._chunks for x in ranked.tips), "a conversation refers to what is gone"
        assert self._waiting.keys() <= self._ranked.keys()
        for name, now in self._found(list(self._waiting), self._chunks).items():
            mine, found = ({x.number for tip in x for x in tip.chain()} for x in (self._ranked[name].tips, now.tips))
            assert mine == found, "a conversation waits for what is there"
            assert now.waits, "a conversation waits for nothing"
