"""`DiskTier`: what of a store is saved, and when what is saved is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

import torch

from kvtier.conversation.archive import Archive
from kvtier.conversation.disk.chunks import Chunk, Disk
from kvtier.conversation.index import WIDTH
from kvtier.conversation.journal import JournalledCache, Took
from kvtier.conversation.kept import Entry, Kept
from kvtier.conversation.waiting import Saved
from kvtier.errors import BudgetError
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.loading import LoadOrCompute


class DiskTier:
    """Saves entries in the background, and loads what is longer on the disk than in memory.

    Args:
        disk: the folder.
        memory, kept, new_cache: of the store.
        device: of the model.
        loading: see `ConversationStore`.

    Attributes:
        stopped: the model is not the one any more that the folder is bound to: nothing is saved or loaded.
    """

    def __init__(
        self,
        disk: Disk,
        memory: TieredMemory,
        kept: Kept,
        new_cache: Callable[..., JournalledCache],
        device: Callable[[], torch.device],
        loading: Literal["auto", "always"],
    ) -> None:
        self.disk = disk
        self.stopped = False
        self._memory = memory
        self._kept = kept
        self._new_cache = new_cache
        self._prices, self._loads_all = LoadOrCompute(), loading == "always"
        self._archive = Archive(disk, self._open, self._layers, device)
        self.flush = self._archive.flush
        self.close = self._archive.close

    # Load

    def bytes_to_load(self, key: Hashable, ids: bytes, *, stateful: bool) -> int:
        """Bytes that `load` would read, if it is not expected to be computed sooner."""
        chunk = self._longer(key, ids, stateful)[2]
        return 0 if chunk is None else sum(x.nbytes for x in chunk.chain())

    def _longer(self, key: Hashable, ids: bytes, stateful: bool) -> tuple[int, int, Chunk | None]:
        """Tokens in memory, and on the disk if these are more, with the chunk that has the last of them."""
        name = _key(key)
        if name is None or self.stopped:
            return 0, 0, None
        length, chunk = self._archive.find(name, ids, stateful=stateful)
        with self._memory.lock:
            if stateful:
                here = next((n for n, _ in self._kept.states_of(key, ids)), 0)
            else:
                here, _ = self._kept.find(key, ids)
        return (here, length, chunk) if length > here else (here, 0, None)

    def load(
        self, key: Hashable, ids: bytes, *, stateful: bool, go_on: Callable[[], bool] = lambda: True
    ) -> tuple[int, str]:
        """Load what is longer there than in memory, unless it is expected to be computed sooner.

        Args:
            go_on: asked before each chunk; what was read until it says no is kept.

        Returns:
            Tokens that were loaded, and why there are none although more is saved.
        """
        prompt = len(ids) // WIDTH + 1
        here, length, chunk = self._longer(key, ids, stateful)
        if chunk is None:
            return 0, ""
        nbytes = sum(x.nbytes for x in chunk.chain())
        with self._memory.lock:
            if not (self._loads_all or self._prices.loads(nbytes, length - here, here, prompt - length)):
                return 0, "what is saved is expected to be computed sooner than loaded"
        began = time.perf_counter()
        with self._new_cache(max_tokens=length) as cache:  # so that room for all is there, or nothing is loaded
            try:
                got, states = self._archive.load(cache, chunk, length, stateful=stateful, go_on=go_on)
            except BudgetError as error:
                self.disk.problem = str(error)
                return 0, "no room for what is saved"
            if not got or self.stopped:
                return 0, "what is saved cannot be read"
            self._kept.keep(cache, key, 0, 0, ids[: got * WIDTH], {got: states} if states is not None else {})
            with self._memory.lock:
                self._prices.loaded(nbytes if got == length else nbytes * got // length, time.perf_counter() - began)
        return got, ""

    def learn(self, took: Iterable[Took]) -> None:
        """Learn from forwards what computing takes."""
        with self._memory.lock:
            for i, each in enumerate(took):
                if each.new > 1 or i == 1:  # of forwards of one token one is enough
                    self._prices.computed(each.new, each.past, each.rows, each.seconds)

    # Save

    def save(self, entry: Entry) -> None:
        """Save an entry soon."""
        name = _key(entry.key)
        with self._memory.lock:
            length = entry.sequence.length
            if name is not None and length and not self.disk.closed:
                self._archive.submit(Saved(name, entry.ids[: length * WIDTH], entry.states.get(length), entry.key))

    def _open(self, saved: Saved) -> JournalledCache | None:
        """A cache with what is kept still of a sequence that is to be saved: with states all of it, or nothing."""
        with self._memory.lock:
            got, entry = self._kept.find(saved.place, saved.ids)
            length = 0 if entry is None else min(got, entry.sequence.length)
            if self.stopped or entry is None or not length:
                return None
            if saved.states is not None and length < len(saved.ids) // WIDTH:
                return None
            sequence = entry.sequence
        cache = self._new_cache()
        try:
            if cache._forward.follow(self._kept.parked, [sequence], length) == length:
                return cache
        except BaseException:
            cache.close()
            raise
        cache.close()
        return None

    def _layers(self) -> list[Any]:
        with self._new_cache() as cache:
            return list(cache.layers)


def _key(key: Hashable) -> str | None:
    """A key as the disk has it; None: what is under it is not saved, for other processes cannot know its salt."""
    salt: Any = key[1]  # type: ignore[index]
    return repr(key) if salt is None or type(salt) in (str, int, bytes) else None
