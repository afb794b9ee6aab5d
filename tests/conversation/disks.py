"""A `Disk` without a model: what is saved of a token follows from the tokens up to it, so that whatever is read can be
checked."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.index import packed
from kvtier.errors import ConfigError

OF = {"model": "m", "config": "c", "weights": "w"}


def disk_of(folder: Path, budget: int | None = None) -> Disk:
    return Disk(folder, budget, OF)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: what goes at once goes as nobody refers to it any more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def held_writes(patch: pytest.MonkeyPatch) -> threading.Event:
    """A slow disk: nothing is written before this is set."""
    write, goes_on = Disk.write, threading.Event()

    def waits(disk: Disk, *args: Any) -> Chunk | None:
        assert goes_on.wait(60)
        return write(disk, *args)

    patch.setattr(Disk, "write", waits)
    return goes_on


def content(ids: Sequence[int], start: int = 0) -> torch.Tensor:
    """`[1, tokens, 4]`, of the tokens from one on."""
    found, at = [], 7
    for x in ids:
        at = (at * 1_000_003 + x + 1) % (2**31 - 1)
        found.append([at, at ^ 1, at ^ 2, x])
    return torch.tensor(found, dtype=torch.int32).reshape(1, len(ids), 4)[:, start:]


def save(disk: Disk, ids: Sequence[int], key: str = "k") -> bool:
    """Save what of a sequence is not saved yet, as `Archive.save` does. Whether all of it is."""
    start, parent = disk.find(key, packed(ids))
    if start < len(ids):
        part = content(ids, start)
        disk.write(key, packed(ids), start, parent, {"k.0": part, "v.0": -part.to(torch.int64)}, 'said "so"')
    return disk.find(key, packed(ids))[0] == len(ids)


def load(disk: Disk, ids: Sequence[int], key: str = "k") -> int:
    """Read what there is of a sequence, and compare it. Its tokens."""
    length, chunk = disk.find(key, packed(ids))
    if chunk is None:
        return 0
    parts, until = [], 0
    for start, stop, tensors, said in disk.read(chunk, length):
        assert start == until < stop <= length
        assert said == 'said "so"'
        assert torch.equal(tensors["v.0"], -tensors["k.0"].to(torch.int64))
        parts.append(tensors["k.0"][:, : stop - start].clone())
        until = stop
    if until:
        assert torch.equal(torch.cat(parts, 1), content(ids[:until])), "other keys and values than were saved"
    return until


def states_of(disk: Disk) -> dict[str, dict[str, Any]]:
    """What all conversations are that are saved; those that are damaged or cannot be read are left out."""
    found = {}
    for name in disk.names():
        with contextlib.suppress(ConfigError):
            state = disk.conversation(name)
            if state is not None:
                found[name] = state
    return found


def turns(rng: random.Random, count: int, least: int = 1, most: int = 9) -> list[int]:
    """Token ids of a few turns."""
    return [rng.randrange(5) for _ in range(sum(rng.randint(least, most) for _ in range(count)))]
