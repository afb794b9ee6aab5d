"""`Archive`: sequences of a store on their way to a disk and back."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.files import LARGEST
from kvtier.conversation.disk.files.straight import Entry
from kvtier.conversation.disk.reading import Part
from kvtier.conversation.index import WIDTH
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.saved.waiting import Saved, Waiting
from kvtier.conversation.states import States, packed_states, unpacked_states
from kvtier.cpu.cached import CachedFile
from kvtier.ends import ends_elsewhere, join, process_ends, retry_on_interrupt, runs
from kvtier.errors import BudgetError
from kvtier.forward.forward import Forward
from kvtier.hf.models.devices import Devices
from kvtier.memory.storage import system
from kvtier.tables.layer import Pieces

#: A thread gets memory for so many tensors at a time, and so many files ahead of the one that is read.
_AT_ONCE, _AHEAD = 8, 2
#: Files that are made of a sequence before others get room.
_FILES = 8
_CPU = torch.device("cpu")


class Archive:
    """Saves in the background, and loads. Nobody waits for a disk that is slow to save, see `Waiting`.

    Args:
        disk: where.
        open_cache: gives an open cache with the first tokens of a sequence, as many as are kept still, or None where
            none are, or not all of one with states; the caller closes it.
        devices: of the model and its layers, now.

    Attributes:
        background: whether a thread saves. Without one, whoever calls `work` or `flush` does: a test says when.
    """

    background = True

    def __init__(
        self,
        disk: Disk,
        open_cache: Callable[[Saved], JournalledCache | None],
        devices: Callable[[], Devices],
    ) -> None:
        self.disk = disk
        self._open_cache = open_cache
        self._devices = devices
        self._waiting = Waiting()
        self._thread: threading.Thread | None = None
        # The thread does not keep a store alive that is dropped without being closed, and ends with it.
        self._finalizer = weakref.finalize(self, self._waiting.end)
        self._finalizer.atexit = False

    # Save

    def submit(self, saved: Saved) -> None:
        """Save a sequence soon; where the process ends, with the next `catch_up`, `flush` or `finish`."""
        _working.add(self)  # first: what is interrupted here leaves no thread that nobody knows
        if self.background and not process_ends() and not runs(self._thread):
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._waiting), name="kvtier-saving", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # a call that has its answer does not fail for it
                self.disk.problem = f"{error}: a sequence was not saved"
                return
        given_up = self._waiting.put(saved)
        if given_up:
            self.disk.problem = f"the disk is too slow: {given_up} sequence(s) that waited longest were not saved"

    def flush(self) -> None:
        """Return when all that was submitted is on the disk, or cannot be."""
        while self._saves_itself and self.work():
            pass
        self._waiting.join()

    def catch_up(self) -> None:
        """Save what was submitted where the process ends in this thread: nobody may come behind it who does. What
        another thread submits then stays: Python may end that one within torch's code."""
        while process_ends() and not ends_elsewhere() and self._saves_itself and self.work():
            pass

    @property
    def _saves_itself(self) -> bool:
        """Whether no thread does. Where the process ends, none is begun: it would not be waited for."""
        return not self.background or (process_ends() and not runs(self._thread))

    def work(self) -> bool:
        """Save what was submitted first of what is not saved yet. Whether there was any."""
        return not self._waiting.empty and _save_next(weakref.ref(self), self._waiting)

    def close(self) -> None:
        """Save what was submitted, and close the folder."""
        self.finish()
        self.disk.close()

    def finish(self) -> None:
        """Save what was submitted, and end the thread."""
        while self._saves_itself and self.work():
            pass
        self._waiting.end()
        join(self._thread)
        self._thread = None

    def save(self, saved: Saved) -> None:
        """Save what of a sequence is kept and not saved yet, in files of about `LARGEST` bytes; with states it is one
        file, for they are of its end. Of a long one some files at a time are made, and others get room in between.

        Raises:
            Exception: it cannot be read from the memory.
        """
        start, parent = self.disk.find(saved.key, saved.ids)
        length = len(saved.ids) // WIDTH
        if saved.states is not None:
            ends = [x for x in self._ends(saved) if x.stop == length]
            if start < length or all(map(self.disk.is_silent, ends)):  # an older folder may have an end without states
                self._save_states(saved, saved.states, start, parent)
            return
        while start < length:
            chunk = self._save_some(saved, start, parent)
            if chunk is None:
                return
            start, parent = chunk.stop, chunk

    def _save_some(self, saved: Saved, start: int, parent: Chunk | None) -> Chunk | None:
        """Save tokens from one on as a chain of chunks, `_FILES` at the most, or nothing of them where the budget
        leaves no room for all that is kept. Returns the last chunk where more is to be saved behind it."""
        cache = self._open_cache(saved)
        if cache is None:
            return None
        with cache:
            length = cache.get_seq_length()
            if length <= start:
                return None
            nbytes = _token_bytes(cache)
            why = self.disk.room.leaves(nbytes * (length - start), parent)
            if why:
                self.disk.problem = why
                return None
            portion = max(LARGEST // max(nbytes, 1), 1)
            stop = min(start + _FILES * portion, length)
            tensors = _read(cache, start, stop)
        for at in range(start, stop, portion):
            ids = saved.ids[: min(at + portion, stop) * WIDTH]
            some = {name: x[:, at - start : at - start + portion] for name, x in tensors.items()}
            parent = self.disk.write(saved.key, ids, at, parent, some, "")
            if parent is None:
                return None
        return parent if stop < length else None

    def _save_states(self, saved: Saved, states: States, start: int, parent: Chunk | None) -> None:
        """Save tokens from one on, and the states behind them."""
        cache = self._open_cache(saved)
        if cache is None:
            return
        with cache:
            tensors = _read(cache, start, len(saved.ids) // WIDTH)
        found = packed_states(states)
        if found is None:
            self.disk.problem = "a layer of the model has states that are no tensors"
            return
        more, about = found
        self.disk.write(saved.key, saved.ids, start, parent, tensors | more, json.dumps(about))

    def _ends(self, saved: Saved) -> list[Chunk]:
        return self.disk.ends(saved.key, saved.ids)

    # Load

    def find(self, key: str, ids: bytes, *, stateful: bool) -> tuple[int, Chunk | None]:
        """The longest beginning of a sequence that can be loaded."""
        if not stateful:
            return self.disk.find(key, ids)
        for chunk in self.disk.ends(key, ids):
            return chunk.stop, chunk
        return 0, None

    def load(
        self,
        cache: JournalledCache,
        chunk: Chunk,
        length: int,
        *,
        start: int = 0,
        states: Mapping[int, Any] | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> tuple[int, States | None]:
        """Bring the first tokens of a saved sequence into an empty cache.

        Args:
            start: those before it are left out; what has states is loaded whole.
            states: new layers of the model, for states; without any it has none.
            go_on: asked before each chunk; it ends where the answer is no.

        Returns:
            Where what it has then ends: before `length` where something is damaged, or where room for the rest was lost
            meanwhile; 0: it has nothing. And for a model with states those at the end.

        Raises:
            BudgetError: there is no room. A cache whose `max_tokens` are these says so before anything is written.
        """
        devices, until, last = self._devices(), 0, dict[str, torch.Tensor]()
        said, blocks = "", None if states else _Blocks(cache, devices)
        try:
            with (
                contextlib.closing(blocks) if blocks is not None else contextlib.nullcontext(),
                contextlib.closing(self.disk.read(chunk, length, start, blocks)) as parts,
            ):
                while go_on() and (part := next(parts, None)) is not None:
                    if part.tensors and not _restore(cache, part, devices):
                        return 0, None
                    until, said = part.stop, part.said
                    # The tensors of a part are in a buffer, which a later part is read into.
                    last = (
                        {name: x.clone() for name, x in part.tensors.items() if name.startswith("s.")} if states else {}
                    )
        except BudgetError as error:
            if states or not until:
                raise
            self.disk.problem = f"{error} Of what is saved, the tokens from {start} to {until} were loaded."
            cache.crop(0)
        if not until or not states:
            return until, None
        if until != length or not said:
            return 0, None
        found, about = None, json.loads(said)
        if _known(about, last, states):
            found = unpacked_states(last, about, states, devices.of)
        if found is None:
            self.disk.problem = "states were saved by another version of Transformers, and are computed"
            return 0, None
        return until, found


#: Archives that may have something to save.
_working: weakref.WeakSet[Archive] = weakref.WeakSet()


@atexit.register
@retry_on_interrupt
def _finish() -> None:
    """The process ends and a store was not closed: save what was submitted. A thread that Python ends within torch's
    code would abort the process."""
    for archive in list(_working):
        archive.finish()


def _token_bytes(cache: JournalledCache) -> int:
    """Bytes of the keys and values of a token, all layers."""
    return sum(reader.layer.layout.token_bytes for reader in cache._forward.readers.values())


def _read(cache: JournalledCache, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Keys and values of some tokens of every layer, on the host. `LARGEST` bytes of one layer at a time, or a little
    more, are where the layer is."""
    tensors = {}
    for i, reader in sorted(cache._forward.readers.items()):
        step = max(LARGEST // reader.layer.layout.token_bytes, 1)
        parts = [
            [x[0].to(_CPU) for x in cache.layers[i].dense("saving", at, min(at + step, stop))]
            for at in range(start, max(stop, start + 1), step)
        ]
        for name, some in zip(("k", "v"), zip(*parts, strict=True), strict=True):
            tensors[f"{name}.{i}"] = some[0].contiguous() if len(some) == 1 else torch.cat(some, 1)
    return tensors


def _restore(cache: JournalledCache, part: Part, devices: Devices) -> bool:
    """Add the tokens of a part to every layer, where it is; False, where they are not as many as it says.

    Raises:
        BudgetError: the cache is in the middle of a step, which `crop(0)` drops.
    """
    tokens = part.stop - part.start
    for i in sorted(int(name[2:]) for name in part.tensors if name.startswith("k.")):
        keys, values = (part.tensors[f"{x}.{i}"][None, :, :tokens] for x in ("k", "v"))
        if keys.shape[2] != tokens or values.shape[2] != tokens:
            return False
        cache._forward.restore(i, keys.to(devices.of(i)), values.to(devices.of(i)))
    cache._forward.steps.end()
    return True


class _Blocks:
    """The blocks of a cache that is loaded, behind what it holds: see `disk.straight.Blocks`.

    New memory comes page by page, which takes longer than to read it full. So blocks of all files that are expected are
    taken at once, and a thread gets their pages, ahead of what is read.

    Args:
        cache: of one row, or of none yet, whose blocks begin and stay in host memory; that of another kind takes none.
        devices: of the model and its layers.
    """

    def __init__(self, cache: JournalledCache, devices: Devices) -> None:
        self._cache, self._devices = cache, devices
        self._expected = deque[int]()
        #: Tokens that are written, those of the file that is read, and those that have blocks.
        self._written = self._tokens = self._reserved = 0
        self._made_layers = False
        #: Tokens of the files that have blocks, and whose pages nobody gets yet.
        self._without_pages = deque[int]()
        self._pool = ThreadPoolExecutor(1, "kvtier-reading")
        #: By the first of a file's tokens and a tensor: its pages.
        self._pages: dict[tuple[int, str], Future[None]] = {}

    def close(self) -> None:
        """Leave the cache with what is written, and end the thread."""
        try:
            self.drop()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def expect(self, tokens: Sequence[int]) -> None:
        """As of `Blocks`."""
        self._written = self._reserved = self._cache.get_seq_length()
        self._expected.extend(tokens)

    def reserve(self, tokens: int, entries: Mapping[str, Entry]) -> bool:
        """As of `Blocks`."""
        if tokens < 2 or self._expected.popleft() != tokens or not self._fit(tokens, entries):
            return False
        self._tokens = tokens
        if self._written == self._reserved:
            self._take()
        self._get_pages(list(entries))
        return True

    def _fit(self, tokens: int, entries: Mapping[str, Entry]) -> bool:
        """Whether a file has what the layers take. Where there are none yet, they are made for it."""
        forward, expected = self._cache._forward, dict[str, tuple[torch.dtype, list[int]]]()
        if not forward.readers and all(self._devices.of(int(name[2:])) == _CPU for name in entries):
            self._made_layers = True  # first: whatever cuts this short, `drop` takes them away
            if not _make_layers(forward, entries):
                return False
        for i, reader in forward.readers.items():
            layer, layout = reader.layer, reader.layer.layout
            if layer.blocks.pools.device is not None or len(layer.rows) > 1:
                return False
            expected[f"k.{i}"] = layout.dtype, [layout.k_heads, tokens, layout.k_dim]
            expected[f"v.{i}"] = layout.dtype, [layout.v_heads, tokens, layout.v_dim]
        return expected == {name: (x.dtype, x.shape) for name, x in entries.items()}

    def _take(self) -> None:
        """Take blocks for this file and those that are expected; if there is no room for all, for this one."""
        files = [self._tokens, *itertools.takewhile(lambda tokens: tokens > 1, self._expected)]
        try:
            self._take_for(sum(files))
        except BudgetError:
            if len(files) == 1:
                raise
            self._cache.crop(0)  # in the middle of a step: what it took goes
            files = files[:1]
            self._take_for(self._tokens)
        self._without_pages = deque(files)

    def _get_pages(self, names: Sequence[str]) -> None:
        """Have the thread get pages, up to `_AHEAD` files ahead, in the order in which they are read."""
        memory = self._cache._forward.memory
        while self._without_pages and len(self._pages) <= _AHEAD * len(names):
            tokens = self._without_pages.popleft()
            first = self._reserved - sum(self._without_pages) - tokens
            for at in range(0, len(names), _AT_ONCE):
                some = names[at : at + _AT_ONCE]
                with memory.lock, memory.change:
                    pieces = [self._pieces(name, first, tokens) for name in some]
                try:
                    pages = self._pool.submit(_populate, pieces)
                except RuntimeError:  # the system has no thread to give
                    return
                self._pages |= {(first, name): pages for name in some}

    def _take_for(self, tokens: int) -> None:
        forward = self._cache._forward
        for i in sorted(forward.readers):
            forward.reserve(i, tokens)
        forward.steps.end()
        self._reserved = self._written + tokens

    def _pieces(self, name: str, first: int, tokens: int) -> Pieces:
        return self._cache._forward.readers[int(name[2:])].layer.pieces(name[0], first, tokens)

    def fill(self, name: str, file: CachedFile) -> bool:
        """As of `Blocks`. A block may be moved at any time that the lock is free, so it is held while a tensor is read:
        from memory, as long as a copy takes."""
        pages = self._pages.pop((self._written, name), None)
        if pages is not None:
            pages.result()
        memory = self._cache._forward.memory
        with memory.lock, memory.change:
            return file.read(*self._pieces(name, self._written, self._tokens))

    def seal(self) -> None:
        """As of `Blocks`."""
        self._written += self._tokens
        if self._written == self._reserved:
            self._complete()

    def drop(self) -> None:
        """As of `Blocks`."""
        for pages in self._pages.values():
            pages.cancel()
        for pages in self._pages.values():
            if not pages.cancelled():
                pages.result()
        self._pages.clear()
        self._without_pages.clear()
        if self._written < self._reserved:
            self._complete()
            self._cache.crop(self._written - self._reserved)
            self._reserved = self._written
        if self._made_layers and not self._written:
            self._made_layers = False
            self._cache._forward.clear()  # another file may have others

    def _complete(self) -> None:
        """What is written can be moved, shared and read."""
        memory = self._cache._forward.memory
        for reader in self._cache._forward.readers.values():
            with memory.lock, memory.change:
                reader.layer.complete(self._written)


def _make_layers(forward: Forward, entries: Mapping[str, Entry]) -> bool:
    """Make the layers, on the CPU, whose keys and values a file has. False, where these are not some of one row and of
    as many."""
    keys, values = ({int(name[2:]): x for name, x in entries.items() if name[:2] == what} for what in ("k.", "v."))
    if keys.keys() != values.keys() or not all(len(x.shape) == 3 for x in entries.values()):
        return False
    for i in sorted(keys):
        shapes = ((x.dtype, (1, x.shape[0], 0, x.shape[2])) for x in (keys[i], values[i]))
        empty = (torch.empty(shape, dtype=dtype, device=_CPU) for dtype, shape in shapes)
        forward.early(i, *empty)
    return True


def _populate(some: list[Pieces]) -> None:
    for first, heads, stride in some:
        for address, nbytes in first:
            for head in range(heads) if nbytes < stride else ():
                system.populate(address + head * stride, nbytes)
            if nbytes == stride:  # a whole block
                system.populate(address, heads * stride)


def _known(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], layers: Mapping[int, Any]) -> bool:
    """Whether all that layers hold was saved. Another version of Transformers may have layers that hold more."""
    saved: dict[str, set[str]] = {index: set(each) for index, each in about.items()}
    for name in tensors:
        _, index, attribute, *_ = name.split(".")
        saved.setdefault(index, set()).add(attribute)
    return all(int(i) in layers and vars(layers[int(i)]).keys() <= names for i, names in saved.items())


def _work(archive: weakref.ref[Archive], waiting: Waiting) -> None:
    """Save what is submitted, until there is nobody who submits."""
    while _save_next(archive, waiting):
        pass


def _save_next(archive: weakref.ref[Archive], waiting: Waiting) -> bool:
    """Wait for what is submitted next, and save it. Whether more may come."""
    saved = waiting.get()
    if saved is None:
        return False
    here = archive()
    try:
        if here is not None:
            here.save(saved)
    except Exception as error:  # nobody waits for it: what was not saved is computed again
        if here is not None:
            here.disk.problem = str(error)
    finally:
        del here, saved  # before somebody hears that it is done
        waiting.done()
    return True
