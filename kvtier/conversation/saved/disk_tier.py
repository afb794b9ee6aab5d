"""`DiskTier`: what of a store is saved, and when what is saved is loaded."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, NamedTuple, cast

from kvtier.config import format_size
from kvtier.conversation.caches import Caches
from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.keys import UNKNOWN, computed_by, key_of, prefix_of
from kvtier.conversation.index import WIDTH
from kvtier.conversation.journal import JournalledCache, Took
from kvtier.conversation.kept.kept import Entry, Kept
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.tail import Tail
from kvtier.conversation.saved.waiting import Saved
from kvtier.errors import BudgetError
from kvtier.hf.models.devices import Devices
from kvtier.hf.models.identity import fingerprint
from kvtier.kernels import launch
from kvtier.memory.access.change import ask
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix

_SOONER = "what is saved is expected to be computed sooner than loaded"


class _Longer(NamedTuple):
    """What is longer on the disk than in memory: the first `length` tokens, of which `chunk` has the last. `here` of
    them are in memory."""

    chunk: Chunk
    length: int
    here: int

    @property
    def files(self) -> list[tuple[int, int]]:
        """The first token and the bytes of each, in order."""
        return [(x.start, x.nbytes) for x in reversed(self.chunk.chain())]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return self.nbytes_from(0)

    def nbytes_from(self, start: int) -> int:
        """Of those that have the tokens from one on."""
        files = self.files
        return sum(nbytes for i, (_, nbytes) in enumerate(files) if i + 1 == len(files) or files[i + 1][0] > start)


class DiskTier:
    """Saves entries in the background, and loads what is longer on the disk than in memory.

    Args:
        disk: the folder.
        memory, kept, caches: of the store.
        devices: of the model and its layers, now.
        loading: see `ConversationStore`.

    Attributes:
        stopped: the model is not the one any more that the folder is bound to: nothing is saved or loaded.
    """

    def __init__(
        self,
        disk: Disk,
        memory: TieredMemory,
        kept: Kept,
        caches: Caches,
        devices: Callable[[], Devices],
        loading: Literal["auto", "always"],
    ) -> None:
        self.disk = disk
        self.stopped = False
        self._memory = memory
        self._kept = kept
        self._caches = caches
        self._loads_all = loading == "always"
        _tell_others(disk)
        self._archive = Archive(disk, self._open, devices)
        # What earlier processes learned on such a machine.
        self._machine = launch.machine(devices().model)
        self._prices, self._saved_prices = LoadOrCompute(), disk.prices(self._machine)
        if self._saved_prices is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):  # damaged: it is learned again
                self._prices = LoadOrCompute.from_json(self._saved_prices)

    # Life

    def flush(self) -> None:
        """Return when all is saved, or cannot be."""
        self._archive.flush()
        with self._memory.lock, self._memory.change:
            prices = self._prices.as_json()
        if prices != self._saved_prices and not self.disk.closed:
            self.disk.save_prices(self._machine, prices)
            self._saved_prices = prices

    def close(self) -> None:
        """Save what is not saved yet, and close the folder. Idempotent."""
        if not self.disk.closed:
            self.flush()
        self._archive.close()

    def erase(self, salt: Hashable, ids: bytes, start: int) -> None:
        """Remove what is saved under a salt and begins with more than the first `start` tokens of a sequence. What
        waits to be saved is saved before, or was dropped from memory and is not.

        Raises:
            ConfigError: it cannot be removed now.
        """
        self._archive.flush()
        self.disk.erase(salt, ids, start)

    # Load

    def bytes_to_load(self, key: Hashable, ids: bytes, *, stateful: bool) -> int:
        """Bytes that `load` would read, if it is not expected to be computed sooner."""
        found = self._longer(key, ids, stateful)
        return 0 if found is None else found.nbytes

    def _longer(self, key: Hashable, ids: bytes, stateful: bool) -> _Longer | None:
        """What is longer on the disk than in memory."""
        name = _key(key)
        if name is None or self.stopped:
            return None
        length, chunk = self._archive.find(name, ids, stateful=stateful)
        with self._memory.lock, self._memory.change:
            if stateful:
                here = next((n for n, _ in self._kept.states_of(key, ids)), 0)
            else:
                here, _ = self._kept.find(key, ids)
        return _Longer(chunk, length, here) if chunk is not None and length > here else None

    def learned(self, token_bytes: int) -> tuple[float, float] | None:
        """Seconds that a load takes, and those of each token in it; None: nothing was loaded yet."""
        with self._memory.lock, self._memory.change:
            fixed, one = self._prices.seconds_to_load(0), self._prices.seconds_to_load(token_bytes)
        return None if fixed is None or one is None else (fixed, one - fixed)

    def load(
        self, key: Hashable, ids: bytes, *, stateful: bool, rows: int = 1, go_on: Callable[[], bool] = lambda: True
    ) -> tuple[int, str]:
        """Load what is longer there than in memory, all of it, unless it is expected to be computed sooner.

        Args:
            rows: that would compute it, for each is a row of a cache (beams).
            go_on: asked before each chunk; what was read until it says no is kept.

        Returns:
            Tokens that were loaded, and why there are none although more is saved.
        """
        found = self._longer(key, ids, stateful)
        if found is None:
            return 0, ""
        if self._choose(found, ids, None, rows) == found.length:
            return 0, _SOONER
        return self._bring(found, 0, key, ids, stateful=stateful, go_on=go_on)

    def load_some(self, key: Hashable, ids: bytes, step: int, rows: int) -> tuple[int, str, Tail | None]:
        """Load what is missing in memory, for a model without states: all of it, its tail, or nothing, as is expected
        to be soonest.

        Args:
            step: tokens that are whole blocks in every layer.
            rows: as for `load`.

        Returns:
            As `load`; and the tail that is to be loaded while what precedes it is computed, if there is one.
        """
        found = self._longer(key, ids, stateful=False)
        if found is None:
            return 0, "", None
        start = self._choose(found, ids, step, rows)
        if start == found.length:
            return 0, _SOONER, None
        if start <= found.here:
            return *self._bring(found, start, key, ids, stateful=False), None
        bring = functools.partial(self._bring, found, start, key, ids, stateful=False)
        return 0, "", Tail(self._memory, start, bring)

    def _choose(self, found: _Longer, ids: bytes, step: int | None, rows: int) -> int:
        """From which token on to load, see `Policy.load_from`."""
        if self._loads_all:
            return found.here if step is not None and found.here % step == 0 else 0
        more = len(ids) // WIDTH + 1 - found.length
        with self._memory.lock, self._memory.change:
            saved = SavedPrefix(found.files, found.length, found.here, more, step, rows)
            return saved.checked(ask(self._memory.policy.load_from, self._prices, saved))

    def _bring(
        self,
        found: _Longer,
        start: int,
        key: Hashable,
        ids: bytes,
        *,
        stateful: bool,
        go_on: Callable[[], bool] = lambda: True,
    ) -> tuple[int, str]:
        """Load and keep the tokens from `start` on. As `load`."""
        began, epoch = time.perf_counter(), self._kept.epoch  # before it is asked whether this has stopped
        new_states = self._caches.new_states(key) if stateful else None
        # Room for all is there, or nothing is loaded.
        with self._caches.new_for(key, max_tokens=found.length - start) as cache:
            try:
                until, states = self._archive.load(
                    cache, found.chunk, found.length, start=start, states=new_states, go_on=go_on
                )
            except BudgetError as error:
                self.disk.problem = str(error)
                return 0, "no room for what is saved"
            if not until or self.stopped:
                return 0, "what is saved cannot be read" if go_on() else "no room for what is saved"
            ids = ids[: until * WIDTH]
            if start:
                self._kept.keep_behind(cache, key, start, ids, epoch=epoch)
            else:
                at = {until: states} if states is not None else {}
                self._kept.keep(cache, key, 0, 0, ids, at, epoch=epoch)
            nbytes = found.nbytes_from(start) * (until - start) // (found.length - start)
            with self._memory.lock, self._memory.change:
                learn = self._prices.loaded_overlapped if start > found.here else self._prices.loaded
                learn(nbytes, time.perf_counter() - began)
        return until - start, ""

    def learn_overlapped(self, took: Took) -> None:
        """Learn from a forward what computing takes while a tail is loaded."""
        with self._memory.lock, self._memory.change:
            self._prices.computed_overlapped(took.new, took.past, took.rows, took.seconds)

    def learn(self, took: Iterable[Took]) -> None:
        """Learn from forwards what computing takes."""
        with self._memory.lock, self._memory.change:
            for i, each in enumerate(took):
                if each.new > 1 or i == 1:  # of forwards of one token one is enough
                    self._prices.computed(each.new, each.past, each.rows, each.seconds)

    # Save

    def save(self, entry: Entry) -> int:
        """Save an entry soon. Its tokens that are saved then: behind its last copy of states nobody could go on."""
        name = _key(entry.key)
        with self._memory.lock, self._memory.change:
            length = max(entry.states, default=0) if entry.stateful else entry.sequence.length
            if name is None or not length or self.disk.closed:
                return 0
            self._archive.submit(Saved(name, entry.ids[: length * WIDTH], entry.states.get(length), entry.key))
        self._archive.catch_up()
        return length

    def _open(self, saved: Saved) -> JournalledCache | None:
        """A cache with what is kept still of a sequence that is to be saved: of one with states, all or nothing."""
        with self._memory.lock, self._memory.change:
            length, entry = self._kept.find(saved.place, saved.ids)
            length = 0 if entry is None else min(length, entry.sequence.length)
            whole = length == len(saved.ids) // WIDTH
            if self.stopped or entry is None or not length or not (whole or saved.states is None):
                return None
            sequence = entry.sequence
        cache = self._caches.new_for(saved.place)
        try:
            if cache._forward.follow(self._kept.parked, [sequence], length) == length:
                return cache
        except BaseException:
            cache.close()
            raise
        cache.close()
        return None


def prefix() -> str:
    """What the keys begin with, on the disk, of what this process computes. A model's code is Transformers', and other
    versions of it may compute other keys and values of the same weights."""
    return prefix_of(fingerprint.COMPUTED_BY)


def _key(key: Hashable) -> str | None:
    """A key as the disk has it; None: what is under it is not saved, for other processes cannot know its salt."""
    computed_as, salt = cast(tuple[tuple[Any, ...], Any], key)
    is_known = salt is None or type(salt) in (str, int, bytes)
    return key_of(fingerprint.COMPUTED_BY, computed_as, salt) if is_known else None


def _tell_others(disk: Disk) -> None:
    """Say that a folder has what another version of Transformers has computed, if it has, and how it is removed: users
    may go back to that version, so nothing removes it for them but a disk budget."""
    if disk.others:
        versions = sorted(set(map(computed_by, disk.others)))
        names = ", ".join("an unknown version of transformers" if x == UNKNOWN else x for x in versions)
        short = " ".join(shlex.quote(x.removeprefix("transformers ")) for x in versions)
        size = format_size(sum(disk.others.values()))
        until = "" if disk.room.budget is None else " until the disk budget needs the room"
        disk.problem = (
            f"{disk.path} has keys and values that were computed by {names}. This is {fingerprint.COMPUTED_BY}, "
            "whose models may compute others: they are computed again where they are needed. Conversations, their ids "
            f"and messages, are what they were. What the others have computed takes {size}, and stays{until}; "
            f"once no store has the folder open, `kvtier store drop {shlex.quote(str(disk.path))} {short}` removes it."
        )
        warnings.warn(disk.problem, RuntimeWarning, stacklevel=4)
