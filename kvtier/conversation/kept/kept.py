"""`Kept`: the sequences that a store keeps, with their ids: found by these, and given up where room is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvtier.conversation.index import WIDTH, PrefixIndex, common
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.kept.ranks import Ranks
from kvtier.conversation.kept.retention import Retention
from kvtier.conversation.states import States, nbytes
from kvtier.errors import BudgetError
from kvtier.eviction.policy import EvictionPolicy
from kvtier.memory.tiered import TieredMemory
from kvtier.tables.parked.sequence import ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences

T = TypeVar("T")

#: Tokens that are thought to fit, as long as the memory was never full.
_CAPACITY = 1 << 16
#: Copies of states that one sequence keeps: the first, and the last ones.
MOST_STATES = 8
#: Tokens between two positions of a prompt at which states are copied.
SPACING = 512


class Entry:
    """A sequence that is kept.

    Attributes:
        key, ids: what it is of, what precedes its first token included.
        sequence: its keys and values.
        stateful: whether it is continued at copies of states only.
        states: of such a one, these copies by position.
    """

    __slots__ = ("ids", "key", "sequence", "stateful", "states")

    def __init__(self, key: Hashable, ids: bytes, sequence: ParkedSequence, stateful: bool = False) -> None:
        self.key = key
        self.ids = ids
        self.sequence = sequence
        self.stateful = stateful
        self.states: dict[int, States] = {}

    @property
    def place(self) -> Hashable:
        """Its key for retention: what is behind a gap stays, or goes, whatever becomes of what precedes it."""
        start = self.sequence.start
        return (self.key, start) if start else self.key


class _At:
    """A copy of an entry's states at a position, as it is found.

    Attributes:
        entry: that has it.
        nbytes: of the copy.
    """

    __slots__ = ("entry", "nbytes")

    def __init__(self, entry: Entry, nbytes: int) -> None:
        self.entry = entry
        self.nbytes = nbytes


class Kept:
    """What a store keeps in memory. Its methods, `keep` and `close` aside, are called under the memory's lock: what is
    parked may go whenever somebody needs room.

    What is kept is what `parked` and `entries` say, and which conversations have which ranks. All else follows from
    that, and is made again where an interrupt has cut a change short at whatever line (`_recover`).

    Args:
        memory: where the keys and values are.
        new_cache: makes a cache of the model on this memory.
        policy: which says what goes first; this is its only user.
        state_budget: bytes of all copies of states.
        forms: the keys under which what is of a key may be kept.

    Attributes:
        parked: the block tables.
        entries: with the ids of each.
        retention: the order in which they go.
        ranks: of conversations, which that order heeds.
        state_bytes: of all copies of states.
        dropped: times that a sequence gave up its end, or all.
        epoch: times that all was dropped. What was computed in one is not kept in a later one: it may be of the weights
            before.
    """

    def __init__(
        self,
        memory: TieredMemory,
        new_cache: Callable[[], JournalledCache],
        policy: EvictionPolicy,
        state_budget: int,
        forms: Callable[[Hashable], tuple[Hashable, ...]] = lambda key: (key,),
    ) -> None:
        self._memory = memory
        self._new_cache = new_cache
        self.retention: Retention[ParkedSequence] = Retention(policy, _CAPACITY)
        with memory.lock, memory.change:
            # An interrupt in the midst of the finalizer, which is Python, costs it: the memory looks itself then.
            self.parked = ParkedSequences(memory, weakref.ref(self))
        # Who drops this on a memory of others gives back what it held, once nothing of it is being saved.
        self._finalizer = weakref.finalize(self, memory.recovery.abandon, self.parked.abandon)
        self._finalizer.atexit = False
        self.parked.shortened = _weakly(self._shortened, None)
        self.parked.victims = _weakly(self._victims, [])
        self.parked.recovered = _weakly(self._recover, None)
        self.entries: dict[ParkedSequence, Entry] = {}
        self._index: PrefixIndex[Entry | _At] = PrefixIndex()
        # Entries behind a gap, by the ids before their first token.
        self._behind: PrefixIndex[Entry] = PrefixIndex()
        self.ranks = Ranks(_weakly(self._sequences, {}), forms, self.parked, self.retention)
        self._at: dict[Entry, dict[int, _At]] = {}
        self._state_budget = state_budget
        self.state_bytes = self.dropped = self.epoch = 0

    # Find

    def find(self, key: Hashable, ids: bytes) -> tuple[int, Entry | None]:
        """The longest beginning of a sequence that is kept: tokens, and an entry that has them."""
        return _find(self._index, key, ids)

    def find_whole(self, key: Hashable, ids: bytes) -> Entry | None:
        """The entry that `find` gives, where it is found by its ids and not by a copy of states; else None."""
        _, found = self._index.find(key, ids)
        return found if isinstance(found, Entry) else None

    def pieces(self, key: Hashable, ids: bytes) -> list[tuple[int, Entry]]:
        """All that is kept of a sequence, its beginning and what is behind gaps: the tokens of each, and the entry. One
        may begin within those of another, and then goes on behind them. Where copies of states are needed to go on, it
        is what precedes the last of them."""
        length, entry = self.find(key, ids)
        if entry is not None and entry.stateful:
            length, entry = next(self.states_of(key, ids), (0, None))
        found = [] if entry is None or not length else [(min(length, entry.sequence.length), entry)]
        until = found[0][0] if found else 0
        for start, stop, each in sorted(self.overlapping(key, ids), key=lambda x: (x[0], -x[1])):
            if stop > until:
                found.append((stop - start, each))
                until = stop
        return found

    def overlapping(self, key: Hashable, ids: bytes) -> Iterator[tuple[int, int, Entry]]:
        """Of what is kept behind gaps, the tokens that are a sequence's: from, to, and the entry."""
        for _, entry in self._behind.prefixes(key, ids):
            start = entry.sequence.start
            stop = min(common(entry.ids, ids), start + entry.sequence.length)
            if stop > start:
                yield start, stop, entry

    def _sequences(self, key: Hashable, ids: bytes) -> dict[ParkedSequence, int]:
        """See `Ranks`."""
        return {entry.sequence: tokens for tokens, entry in self.pieces(key, ids)}

    def states_of(self, key: Hashable, ids: bytes) -> Iterator[tuple[int, Entry]]:
        """The copies of states at which a sequence can go on, the longest first: tokens, and the entry."""
        for length, found in self._index.prefixes(key, ids):
            if isinstance(found, _At) and min(found.entry.sequence.length, common(found.entry.ids, ids)) >= length:
                yield length, found.entry

    # Use

    def hold(self, entries: Iterable[Entry], user: object) -> None:
        """A cache continues these: they go last."""
        for entry in entries:
            entry.sequence.users.add(user)
            self.parked.touch(entry.sequence)
            self.retention.hold(entry.sequence)

    def release(self, entries: Iterable[Entry], user: object) -> None:
        """The opposite of `hold`."""
        for entry in entries:
            entry.sequence.users.discard(user)
            if not entry.sequence.users:
                self.retention.release(entry.sequence)

    def use(self, entries: Sequence[Entry], tokens: Sequence[int]) -> None:
        """A call begins with so many first tokens of each."""
        for count in set(tokens):
            self.retention.use([x.sequence for x, n in zip(entries, tokens, strict=True) if n == count], count)

    def cut_out(self, key: Hashable, ids: bytes, start: int, stop: int) -> None:
        """Drop tokens in the middle of what is kept of a sequence. Where copies of states are needed to go on, nobody
        could go on behind them, and what follows is dropped too."""
        length, entry = self.find(key, ids)
        pieces = [] if entry is None or length <= start else [entry]
        for each in pieces + [each for _, until, each in self.overlapping(key, ids) if start < until]:
            sequence = each.sequence
            first, last = max(start - sequence.start, 0), min(stop - sequence.start, sequence.length)
            if each.states:
                self.parked.shorten(sequence, first)
            elif first < last:
                self._cut_out(each, first, last)
        self.ranks.refresh()

    def shorten(self, entry: Entry, length: int) -> None:
        """Keep of an entry no more than the first `length` tokens of its sequence, and no more of their ids."""
        self.parked.shorten(entry.sequence, min(max(length - entry.sequence.start, 0), entry.sequence.length))
        if entry.stateful:  # others have no more ids than tokens
            entry.ids = entry.ids[: entry.sequence.length * WIDTH]
        self.ranks.refresh()

    def _cut_out(self, entry: Entry, start: int, stop: int) -> None:
        ids = entry.ids
        rest = self.parked.cut_out(entry.sequence, start, stop)
        if rest is not None:
            self._add_behind(entry.key, ids, rest)

    def _add_behind(self, key: Hashable, ids: bytes, sequence: ParkedSequence) -> None:
        made = Entry(key, ids, sequence)
        self.entries[sequence], self._at[made] = made, {}
        self._behind.add(key, ids[: sequence.start * WIDTH], made)
        self.retention.keep(sequence, made.place, ids[sequence.start * WIDTH :])

    # Keep

    def keep(
        self,
        cache: JournalledCache,
        key: Hashable,
        row: int,
        pad: int,
        ids: bytes,
        states: dict[int, States],
        name: str | None = None,
        *,
        epoch: int,
    ) -> Entry | None:
        """Keep a row of a cache, less its padding, with copies of states by position. None: there is no room, or all
        was dropped meanwhile.

        Args:
            epoch: that was when the call began.
            name: of the conversation that goes on with this: its rank is that of these tokens from now on.
        """
        length = len(ids) // WIDTH

        def park(parked: ParkedSequences, then: Callable[[ParkedSequence], None]) -> None:
            if not pad:
                cache._forward.park(parked, row, length, then=then)
                return
            with self._new_cache() as plain:
                for i in sorted(cache._forward.readers):
                    keys, values = cache.layers[i].dense("padded batch")
                    stop = pad + length
                    plain._forward.restore(i, keys[row : row + 1, :, pad:stop], values[row : row + 1, :, pad:stop])
                plain._forward.steps.end()
                plain._forward.park(parked, 0, length, then=then)

        return self.add(key, ids, park, states, name, epoch=epoch)

    def add(
        self,
        key: Hashable,
        ids: bytes,
        park: Callable[[ParkedSequences, Callable[[ParkedSequence], None]], object],
        states: dict[int, States],
        name: str | None = None,
        *,
        epoch: int,
    ) -> Entry | None:
        """Keep what `park` parks, the tokens `ids`, unless they are kept already. As `keep`. `park` calls its second
        argument with the sequence, under the lock under which it has made it."""
        with self._memory.lock, self._memory.change:
            if epoch != self.epoch:
                return None
            if name is not None:  # before a cache gives up its claim
                self.ranks.follow(name, key, ids)
            entry = self._known(key, ids, states)
        if entry is not None:
            return entry
        found = list[Entry | None]()

        def then(sequence: ParkedSequence) -> None:
            if epoch == self.epoch:
                found.append(self._add(key, ids, sequence, states))
            else:
                self.parked.drop(sequence)

        try:
            park(self.parked, then)
        except BudgetError:
            return None  # no room for a copy: nothing is lost but the time to compute it again
        return found[0] if found else None

    def keep_behind(self, cache: JournalledCache, key: Hashable, start: int, ids: bytes, *, epoch: int) -> None:
        """Keep what a cache of one row holds, the tokens of a sequence from `start` on, whatever is kept before them;
        nothing, if all was dropped since `epoch`. `ids` are those of the whole sequence."""

        def then(sequence: ParkedSequence) -> None:
            if epoch != self.epoch:
                self.parked.drop(sequence)
                return
            self._add_behind(key, ids, sequence)
            self.ranks.kept(key, ids)

        cache._forward.park(self.parked, 0, len(ids) // WIDTH - start, start, then)

    def _known(self, key: Hashable, ids: bytes, states: dict[int, States]) -> Entry | None:
        """The entry that has all of these tokens already. It takes over copies of states that it lacks."""
        _, entry = self.find(key, ids)
        if entry is None or min(common(entry.ids, ids), entry.sequence.length) < len(ids) // WIDTH:
            return None
        self.parked.touch(entry.sequence)
        self._add_states(entry, ids, states)
        self.ranks.kept(key, ids)
        return entry

    def _add(self, key: Hashable, ids: bytes, sequence: ParkedSequence, states: dict[int, States]) -> Entry | None:
        """Keep a sequence that was parked just now, in place of those that are its beginning. None: there is no room
        for its states."""
        entry = Entry(key, ids, sequence, bool(states))
        # Before older ones go: what both have stays known.
        self.retention.keep(sequence, entry.place, entry.ids)
        for old in [x.entry if isinstance(x, _At) else x for _, x in self._index.prefixes(key, ids)]:
            if len(old.ids) <= len(ids) and old.ids == ids[: len(old.ids)] and old in self._at:
                states = {**old.states, **states}
                self._forget(old)
                self.parked.drop(old.sequence)
        for old in [x for _, x in self._behind.prefixes(key, ids) if ids[: len(x.ids)] == x.ids]:
            self.parked.drop(old.sequence)
        self.entries[sequence] = entry
        self._at[entry] = {}
        self._add_states(entry, ids, states)
        if not states:
            self._index.add(key, entry.ids, entry)
        self.ranks.kept(key, entry.ids)
        return entry if sequence.length else None

    def _add_states(self, entry: Entry, ids: bytes, states: dict[int, States]) -> None:
        """An entry has these copies, those of the tokens that are kept now."""
        for length, each in states.items():
            if length <= entry.sequence.length and length not in entry.states:
                entry.states[length] = each
                self._at[entry][length] = at = _At(entry, nbytes(each))
                self.state_bytes += at.nbytes
                self._index.add(entry.key, entry.ids[: length * WIDTH], at)
        if not states:
            return
        self.ranks.kept(entry.key, ids)  # first: who is pinned goes on from a new copy now
        stays, end = self.ranks.pinned_at(entry.sequence), max(states)
        others = [n for n in sorted(entry.states)[1:] if n not in stays and n != end]
        for length in others[: max(len(entry.states) - MOST_STATES, 0)]:
            self._drop_states(entry, length)
        self._bound_states(entry, end)

    def _bound_states(self, newest: Entry, end: int) -> None:
        """Drop what was used longest ago until the copies of states are within their budget; the newest goes last, and
        of its copies that at `end`, from where the next turn goes on. What is pinned stays: then the newest keeps fewer
        copies, those of its own that are pinned last, or is not kept."""
        for sequence in list(self.parked.sequences):
            if self.state_bytes <= self._state_budget:
                return
            entry = self.entries.get(sequence)
            if entry is not None and entry is not newest and entry.states and not sequence.pinned:
                self.parked.drop(sequence)  # a call that continues it has copied its states
        pinned = self.ranks.pinned_at(newest.sequence)
        for length in sorted(newest.states, key=lambda n: (n in pinned, n == end, n)):
            if self.state_bytes > self._state_budget:
                self._drop_states(newest, length)
        if not newest.states:
            self.parked.drop(newest.sequence)

    # Give up

    def close(self) -> None:
        """Drop all that is kept and leave the memory, whose lock the caller does not hold. Idempotent."""
        if self._finalizer.alive:
            with self._memory.lock, self._memory.change:
                self.parked.close()
            self._finalizer.detach()

    def clear(self) -> None:
        """Drop all that is kept, and what running calls compute."""
        self.epoch += 1
        self.parked.clear()

    def drop_lost(self) -> None:
        """Drop what was parked and is in no index, for that was cut short."""
        for sequence in [x for x in self.parked.sequences if x not in self.entries]:
            self.parked.drop(sequence)

    def drop_corrupt(self, suspects: Iterable[Entry]) -> None:
        """Drop what holds blocks that were found to hold other bytes than were written, and these."""
        those = {entry.sequence for entry in suspects}
        for sequence in list(self.parked.sequences):
            if sequence.corrupt or sequence in those:
                self.parked.drop(sequence)

    def _drop_states(self, entry: Entry, length: int) -> None:
        del entry.states[length]
        at = self._at[entry].pop(length)
        self.state_bytes -= at.nbytes
        self._index.remove(at)
        self.ranks.shortened(entry.sequence)

    def _forget(self, entry: Entry) -> None:
        for length in list(entry.states):
            self._drop_states(entry, length)
        self._index.remove(entry)
        self._behind.remove(entry)
        self.entries.pop(entry.sequence, None)
        self._at.pop(entry, None)

    def _shortened(self, sequence: ParkedSequence) -> None:
        """A sequence has given up its end, or all of it."""
        self.retention.shortened(sequence, sequence.length)
        self.ranks.shortened(sequence)
        entry = self.entries.get(sequence)
        if entry is None:
            return
        self.dropped += 1
        for length in [n for n in entry.states if n > sequence.length]:
            self._drop_states(entry, length)
        if entry.stateful and sequence.length > (useful := max(entry.states, default=0)):
            self.parked.shorten(sequence, useful)  # nobody can continue behind the last copy
        elif not sequence.length:
            self._forget(entry)
        elif entry in self._behind:
            entry.ids = entry.ids[: (sequence.start + sequence.length) * WIDTH]
        elif entry in self._index:
            entry.ids = entry.ids[: sequence.length * WIDTH]
            self._index.add(entry.key, entry.ids, entry)

    def _victims(self) -> list[tuple[ParkedSequence, int]]:
        """What gives up room next; see `ParkedSequences.victims`."""
        self.ranks.refresh()
        self.retention.full()
        return self.retention.evict()

    def _recover(self) -> None:
        """A change was cut short. Index, order and ranks follow from what is parked; see the class."""
        self._index, self._behind, self._at = PrefixIndex(), PrefixIndex(), {}
        self.state_bytes = 0
        self.retention.clear()
        self.ranks.clear()
        found = {sequence: self.entries[sequence] for sequence in self.parked.sequences if sequence in self.entries}
        self.entries = found
        for sequence, entry in found.items():
            until = (sequence.start + sequence.length) * WIDTH
            entry.ids = entry.ids[:until]
            entry.states = {n: x for n, x in entry.states.items() if n <= sequence.length}
            self._at[entry] = {n: _At(entry, nbytes(x)) for n, x in entry.states.items()}
            self.state_bytes += sum(at.nbytes for at in self._at[entry].values())
            for n, at in self._at[entry].items():
                self._index.add(entry.key, entry.ids[: n * WIDTH], at)
            if sequence.start:
                self._behind.add(entry.key, entry.ids[: sequence.start * WIDTH], entry)
            elif not entry.stateful:
                self._index.add(entry.key, entry.ids, entry)
            self.retention.keep(sequence, entry.place, entry.ids[sequence.start * WIDTH :])
            if sequence.users:
                self.retention.hold(sequence)
        # All agrees again: the rest is as ever.
        self.drop_lost()
        for entry in list(found.values()):
            if entry.stateful and entry.sequence.length > (useful := max(entry.states, default=0)):
                self.parked.shorten(entry.sequence, useful)
        for entry in [x for x in self.entries.values() if x.states][-1:]:
            self._bound_states(entry, max(entry.states))
        self.ranks.refresh()

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept, found and counted agrees. For tests and debugging."""
        self.parked.check_integrity()
        self.ranks.check_integrity(self.parked.sequences)
        self.retention.check_integrity(self.entries)
        assert self.entries.keys() == self.parked.sequences.keys(), "a sequence without ids"
        assert self._at.keys() == set(self.entries.values())
        assert self.state_bytes == sum(at.nbytes for those in self._at.values() for at in those.values())
        assert len(self._behind) == sum(1 for x in self.entries if x.start), "an entry behind a gap that is gone"
        for sequence, entry in self.entries.items():
            assert max(entry.states, default=0) <= sequence.length, "states of tokens that are gone"
            if not entry.stateful:
                assert len(entry.ids) == (sequence.start + sequence.length) * WIDTH, "ids of tokens that are gone"
                assert entry in (self._behind if sequence.start else self._index), "a sequence that nobody finds"
            for length, at in self._at[entry].items():
                assert at in self._index
                assert length in entry.states


def _find(index: PrefixIndex[Entry | _At], key: Hashable, ids: bytes) -> tuple[int, Entry | None]:
    length, found = index.find(key, ids)
    return length, found.entry if isinstance(found, _At) else found


def _weakly(method: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """A method of an object that it does not keep alive."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        found = weak()
        return otherwise if found is None else found(*args)

    return call
