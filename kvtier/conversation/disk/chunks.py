"""`Chunks`: what a folder has of saved sequences, found by token ids, and in the order of its use. Touches no file."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.conversation.disk.keys import end_of, with_ends
from kvtier.conversation.disk.rows.manifest import Row
from kvtier.conversation.index import WIDTH, PrefixIndex

#: Bytes that a row takes besides its file and ids, at the most, for the budget.
ROW = 512


@dataclass(eq=False, slots=True)
class Chunk:
    """Some tokens of a saved sequence. Their ids are in the index.

    Attributes:
        number: of its row and file.
        parent: that it continues; None: it begins a sequence.
        start, stop: its own tokens; the chain before it ends at `start`.
        nbytes, checksum: of its file.
        digest: of its row.
        used: when it was used last, counted.
        children: chunks that continue it; None: there are none.
    """

    number: int
    parent: Chunk | None
    start: int
    stop: int
    nbytes: int
    checksum: bytes
    digest: bytes
    used: int = 0
    children: set[Chunk] | None = None

    @property
    def below(self) -> Collection[Chunk]:
        """What continues it."""
        return self.children or ()

    @property
    def kept(self) -> int:
        """Bytes that it takes, of its file and its row."""
        return self.nbytes + ROW + (self.stop - self.start) * WIDTH

    def chain(self) -> list[Chunk]:
        """Itself, what it continues, and so on."""
        found = list[Chunk]()
        at: Chunk | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found


class Chunks:
    """The chunks of a folder. Every chunk is before its parent in the order of their use: the first one is the next to
    go, and nobody continues it. Not for several threads at once.

    Attributes:
        nbytes: that all take, of their files and their rows.
        row_bytes: of these, what is counted of rows.
        uses: counted, for clocks are set back.
        unsaved: when chunks were used, by number, as far as the manifest does not know. Of a chain the end is noted:
            what it continues was used no earlier. So a turn writes as much however long its history is.
        in_doubt: a change is being made, or was cut short: then only the manifest's rows tell what is there.
    """

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._index: PrefixIndex[Chunk] = PrefixIndex()
        self.nbytes = self.row_bytes = self.uses = 0
        self.unsaved: dict[int, int] = {}
        self.in_doubt = False

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """What was used longest ago first."""
        return iter(self._chunks.values())

    def __contains__(self, chunk: Chunk) -> bool:
        return self._chunks.get(chunk.number) is chunk

    @property
    def numbers(self) -> Collection[int]:
        """Of all of them, in that order."""
        return self._chunks.keys()

    def get(self, number: int) -> Chunk | None:
        """The chunk of a number."""
        return self._chunks.get(number)

    # Find

    def find(self, key: str, ids: bytes) -> tuple[int, Chunk | None]:
        """The longest beginning of a sequence that is there: tokens, and the chunk that has the last of them."""
        length, chunk = self._index.find(key, ids)
        while chunk is not None and chunk.start >= length:
            chunk = chunk.parent  # what goes on from these tokens was found, and has none of them
        return length, chunk

    def ends(self, key: str, ids: bytes) -> list[Chunk]:
        """The chunks at whose end a sequence begins with all that is there, the longest first."""
        return [chunk for _, chunk in self._index.prefixes(key, ids)]

    def under(self, sequences: Sequence[tuple[object, bytes]]) -> Iterator[set[int]]:
        """For each of some sequences, given as its salt and its ids: the numbers of the chunks that its tokens are in,
        under every key that has this salt."""
        for tips, _ in self.tips(sequences):
            yield {x.number for tip in tips for x in tip.chain()}

    def tips(
        self, sequences: Sequence[tuple[object, bytes]], others: Collection[int] = (), *, stateful: bool = False
    ) -> Iterator[tuple[tuple[Chunk, ...], int]]:
        """For each of some sequences: the last chunks that its tokens are in, none in the chain of another one; and how
        many of its tokens are held under one key, at the most.

        Args:
            others: numbers of chunks that hold none, for nobody here looks for them.
            stateful: only what ends with a chunk is held, for the states are at its end.
        """
        ends = [end_of(salt) for salt, _ in sequences]
        keys = self._keys(ends)
        for end, (_, ids) in zip(ends, sequences, strict=True):
            tips, seen, most = list[Chunk](), set[int](), 0
            for key in keys.get(end, ()):
                length, longest = self._index.find(key, ids)
                whole = self.ends(key, ids)  # the longest first
                if longest is not None and longest.number not in others:  # as all under this key
                    most = max(most, max((x.stop for x in whole), default=0) if stateful else length)
                found = [] if longest is None else [x for x in longest.chain() if x.start < length][:1]
                for tip in found + whole:
                    if tip.number not in seen:
                        tips.append(tip)
                        seen.update(x.number for x in tip.chain())
            yield tuple(tips), most

    def there(self, chunk: Chunk) -> Chunk | None:
        """A chunk that was there, or the last one in its chain that is there still."""
        at: Chunk | None = chunk
        while at is not None and at.number not in self._chunks:
            at = at.parent
        return None if at is None else self._chunks[at.number]

    def beyond(self, salt: object, ids: bytes, start: int) -> list[Chunk]:
        """Chunks that begin behind `start` tokens of a sequence or more, and whose own sequences have more of its
        tokens than these, under every key that has this salt; what continues a chunk before it."""
        head, end = ids[: (start + 1) * WIDTH], end_of(salt)
        if len(ids) <= start * WIDTH:
            return []
        keys = self._keys([end]).get(end, ())
        found = [x for key in keys for x in self._index.continuing(key, head) if x.start >= start]
        return sorted(found, key=lambda x: -x.start)

    def _keys(self, ends: Sequence[str]) -> dict[str, list[str]]:
        """See `with_ends`."""
        return with_ends((x for x in self._index.all_keys() if isinstance(x, str)), ends)

    # Change

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Around a change, with the commit that it follows. Whatever ends it early, an interrupt at any line included,
        leaves what is here in doubt."""
        before, self.in_doubt = self.in_doubt, True
        yield
        self.in_doubt = before

    def become(self, others: Chunks) -> None:
        """Have what others have, with the use that is noted here of each. It is done at once, or not at all."""
        later = {
            x.number: x.used for x in self if x.number in others._chunks and x.used > others._chunks[x.number].used
        }
        others.order({x.number: x.used for x in others} | later)
        others.unsaved = later
        vars(self).update(vars(others))

    def add(self, row: Row, parent: Chunk | None) -> Chunk:
        """Add the chunk of a row, behind its parent. It was used last, until `use` or `order` say otherwise."""
        stop = row.start + len(row.ids) // WIDTH
        chunk = Chunk(row.number, parent, row.start, stop, row.nbytes, row.checksum, row.digest)
        if parent is None:
            self._index.add(row.key, row.ids, chunk)
        else:
            parent.children = parent.children or set()
            parent.children.add(chunk)
            self._index.extend(parent, parent.stop - row.start, row.ids, chunk)
        self._chunks[chunk.number] = chunk
        self.nbytes += chunk.kept
        self.row_bytes += chunk.kept - chunk.nbytes
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk that nobody continues any more."""
        del self._chunks[chunk.number]
        self.unsaved.pop(chunk.number, None)
        self._index.remove(chunk)
        self.nbytes -= chunk.kept
        self.row_bytes -= chunk.kept - chunk.nbytes
        if chunk.parent is not None and chunk.parent.children is not None:
            chunk.parent.children.discard(chunk)
            chunk.parent.children = chunk.parent.children or None
            # The manifest had it from the child. A parent that goes too is taken out again when it goes.
            self.unsaved[chunk.parent.number] = chunk.parent.used

    def use(self, chunk: Chunk) -> None:
        """Note that a chain is used now."""
        with self.change():
            self.uses += 1
            for number in [x.number for x in chunk.chain()]:
                if number in self._chunks:
                    self._chunks.move_to_end(number)
                    self._chunks[number].used = self.uses
            if chunk.number in self._chunks:
                self.unsaved[chunk.number] = self.uses

    def order(self, used: Mapping[int, int]) -> None:
        """All of them were used last as the manifest says, by number."""
        last = dict(used)
        # Whoever uses a chunk uses all before it: a parent was used no earlier than its children.
        for chunk in reversed(self._chunks.values()):
            if chunk.parent is not None:
                last[chunk.parent.number] = max(last[chunk.parent.number], last[chunk.number])
        for number in sorted(last, key=lambda n: (last[n], -n)):
            self._chunks[number].used = last[number]
            self._chunks.move_to_end(number)
        self.uses = max(last.values(), default=0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is counted and ordered agrees. For tests and debugging."""
        assert self.nbytes == sum(x.kept for x in self)
        assert self.row_bytes == sum(x.kept - x.nbytes for x in self)
        assert len(self._index) == len(self._chunks)
        seen = set[Chunk]()
        for number, chunk in self._chunks.items():
            assert chunk.number == number
            assert chunk in self._index
            assert seen >= (chunk.children or set()), "a chunk is to go before what continues it"
            assert chunk.parent is None or chunk in (chunk.parent.children or ())
            above = chunk.parent
            assert chunk.start == 0 if above is None else above.start < chunk.start <= above.stop
            seen.add(chunk)


def fits(row: Row, parent: Chunk | None) -> bool:
    """Whether a row can be, given what it continues."""
    if len(row.ids) % WIDTH or (parent is None) != (row.parent is None) or row.nbytes < 0:
        return False
    if parent is None:
        return not row.start and bool(row.ids)
    return parent.start < row.start <= parent.stop
