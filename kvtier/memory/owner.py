"""`Owner`: what a memory knows of one cache, or of one `ParkedSequences`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from kvtier.memory.blocks.block import BlockSet
from kvtier.memory.storage.buffers import IoBuffers, Workspace
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.admission import Claim
from kvtier.stats import Counters


class Owner:
    """The part of a memory that one cache has, or one `ParkedSequences`.

    Attributes:
        number: unique.
        counters: what was done for it.
        claims: what it may take on each compute device until its next forward begins.
        sets: its blocks.
        workspaces, io_buffers: what its attention passes through, by device; buffers also by number.
        uses_threads: whether threads of the native library may be at work or asleep for it.
        user, release: who ends when nobody uses it any more, and what gives up then what it held; None: nobody does.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.counters = Counters()
        self.claims: dict[ComputeDevice, Claim] = {}
        self.sets: list[BlockSet] = []
        self.workspaces: dict[ComputeDevice, Workspace] = {}
        self.io_buffers: dict[tuple[ComputeDevice, int], IoBuffers] = {}
        self.uses_threads = False
        self.user: weakref.ref[Any] | None = None
        self.release: Callable[[], object] | None = None
