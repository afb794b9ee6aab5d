"""`Held`: what a cache holds of a memory, and how it is given back."""

from __future__ import annotations

import weakref
from typing import Any

from kvtier.attention import split
from kvtier.attention.reader import LayerReader
from kvtier.memory.owner import Owner
from kvtier.memory.tiered import TieredMemory


class Held:
    """What a cache holds of a memory: apart from `Forward`, so that it can be given back when that is garbage."""

    def __init__(self, memory: TieredMemory) -> None:
        self.memory = memory
        self.owner: Owner = memory.new_owner()
        self.user: weakref.ref[Any] | None = None
        self.readers: dict[int, LayerReader] = {}

    def lengths(self) -> set[int]:
        """The distinct numbers of tokens in the layers that hold any."""
        return {x.layer.length for x in self.readers.values() if x.layer.length}

    def release(self) -> None:
        """Give everything back. The caller holds the lock."""
        split.release_threads(self.owner)
        for reader in self.readers.values():
            reader.layer.forget()
        self.readers.clear()
        for device in self.memory.devices:
            for blocks in [blocks for blocks in self.owner.sets if blocks in device.sets]:
                self.memory.drop_set(self.owner, device, blocks)
        self.memory.leave(self.owner)
        if self.memory.private:
            self.memory.reset()

    def join(self) -> None:
        """Join the memory. Whatever cuts this short, `release` finds the owner that has joined."""
        self.owner.user, self.owner.release = self.user, self.release
        self.memory.join(self.owner)

    def renew(self) -> None:
        """Join the memory again, empty."""
        self.owner = self.memory.new_owner()
        self.join()
