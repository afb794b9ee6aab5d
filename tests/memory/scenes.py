"""Scenes with two threads: one reads a layer, the other acts on its blocks at one of the places where the first lets go
of the memory's lock. All places are tried, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from stepped import Turns, check_lock
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.memory.blocks import reclaim, residency
from kvtier.memory.blocks.block import BlockSet, State
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.testing import held, with_doubles

HEADS, DIM, BLOCK, TOKENS, ROWS = 2, 4, 4, 42, 2
#: Places that are tried, at the most.
PLACES = 30


class Once(Turns):
    """The first thread gives its turn away once, at the `place`-th place where it could.

    Attributes:
        done: whether it has.
    """

    def __init__(self, place: int) -> None:
        super().__init__(0)
        self._left = place
        self._reader = 0
        self.done = False

    def read(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job of the first thread."""

        def run() -> None:
            self._reader = threading.get_ident()
            job()

        return run

    def maybe_switch(self) -> None:
        """Here the other thread goes on, if this is the place."""
        if self._reader == 0 and len(self._ready) > 1:
            self._switch(threading.get_ident())  # the other thread begins when it is told to
        if threading.get_ident() == self._reader and not self.done and len(self._ready) > 1:
            self._left -= 1
            if self._left < 0:
                self.done = True
                self._switch(self._reader)


class Scene:
    """A layer with blocks on the device, arriving there, and on the host, in slots with gaps between them."""

    def __init__(self, turns: Turns, *, host_attention: bool) -> None:
        memory = TieredMemory(device_budget=60_000, host_budget=60_000)
        self.memory = with_doubles(memory, held(0, 0.0))
        turns.install(memory)
        self.cache, other = (
            TieredKVCache(memory=memory, block_size=BLOCK, host_attention=host_attention) for _ in range(2)
        )
        generator = torch.Generator("cpu").manual_seed(0)
        self.dense = [torch.randn(ROWS, HEADS, TOKENS, DIM, generator=generator, device="cpu") for _ in range(2)]
        self.query = torch.randn(ROWS, HEADS, 20, DIM, generator=generator, device="cpu")
        other.update(*self.dense, 0)
        with memory.lock:
            # Large slabs, in which there will be gaps.
            pools = other._forward.readers[0].layer.blocks.pools
            for pool in (pools.device, pools.host):
                assert pool is not None
                assert pool.grow(40) == 40
        self.cache.update(*self.dense, 0)
        with memory.lock:
            self.device: ComputeDevice = memory.devices[0]
            self.blocks, others = (x._forward.readers[0].layer.blocks for x in (self.cache, other))
            for _ in range(4):
                for blocks in (others, self.blocks):
                    self.device.evict_from(blocks, 2)
            self.device.engine.drain()
            self.device.poll()
        other.close()
        with memory.lock:
            self.device.fetch(self.on_host(self.blocks), 3, None, evict=False)
        states = {run.state for run in self.blocks.runs}
        assert states >= {State.DEVICE, State.ARRIVING, State.HOST, State.FILLING}

    @staticmethod
    def on_host(blocks: BlockSet) -> list[residency.Run]:
        """Runs that are nowhere else."""
        return [run for run in blocks.runs if run.state is State.HOST]

    def check(self, found: torch.Tensor, queries: int) -> None:
        """Whether that is the attention of the first queries."""
        mask = torch.ones(queries, TOKENS, dtype=torch.bool).tril(TOKENS - queries)[None, None]
        right = F.scaled_dot_product_attention(self.query[:, :, :queries], *self.dense, attn_mask=mask)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)

    def attend(self, queries: int) -> None:
        """Read by attention."""
        mask = torch.ones(queries, TOKENS, dtype=torch.bool).tril(TOKENS - queries)[None, None]
        layer = self.cache.layers[0]
        query = self.query[:, :, :queries]
        self.check(F.scaled_dot_product_attention(query, layer.keys, layer.values, attn_mask=mask), queries)

    def copy(self) -> None:
        """Read all as tensors."""
        for found, right in zip((self.cache.layers[0].keys, self.cache.layers[0].values), self.dense, strict=True):
            assert torch.equal(found.dense(), right)


#: How a layer is read, and whether host threads may attend.
READS: dict[str, tuple[bool, Callable[[Scene], None]]] = {
    "in place": (True, lambda scene: scene.attend(1)),
    "streamed": (True, lambda scene: scene.attend(20)),
    "as one tensor": (False, lambda scene: scene.attend(1)),
    "copied": (False, lambda scene: scene.copy()),
}


def spill(scene: Scene) -> None:
    """Its blocks leave the device."""
    scene.device.evict_from(scene.blocks, 100)


def give_up(scene: Scene) -> None:
    """Fetches of its blocks are given up, and the copies end."""
    for run in [run for run in scene.blocks.runs if run.state is State.ARRIVING]:
        residency.evict(run, scene.device.fence(scene.blocks))
    scene.device.engine.drain()
    scene.device.poll()


def give_up_early(scene: Scene) -> None:
    """Fetches of its blocks are given up, and the copies have not begun."""
    for run in [run for run in scene.blocks.runs if run.state is State.ARRIVING]:
        residency.evict(run, scene.device.fence(scene.blocks))


def cancel(scene: Scene) -> None:
    """All fetches are given up for want of room."""
    scene.device.eviction.cancel()


def promote(scene: Scene) -> None:
    """All its blocks come to the device, and lose their place on the host."""
    for run in scene.device.fetch(scene.on_host(scene.blocks), 100, None, evict=False):
        residency.arrive(run)
    scene.device.poll()
    while scene.memory.host._drop_copy(None):
        pass
    scene.device.poll()


def pack_device(scene: Scene) -> None:
    """Somebody needs the device, but for the blocks that are being filled."""
    assert scene.device.slabs is not None
    filling = scene.blocks.counts[State.FILLING] * scene.blocks.pools.layout.nbytes
    scene.device.make_room(scene.device.slabs.budget.limit - filling)


def pack_free(scene: Scene) -> None:
    """Somebody needs what is free on the device, in one piece."""
    scene.device.make_room(reclaim.free_bytes(scene.device.device_pools))


def pack_host(scene: Scene) -> None:
    """Somebody needs what is free on the host, in one piece."""
    pools = scene.memory.host.pools.values()
    free = scene.memory.host.slabs.budget.free + sum(pool.free * pool.layout.nbytes for pool in pools)
    scene.memory.host.make_room(free)


def release_idle(scene: Scene) -> None:
    """Workspaces and buffers that nobody uses are given back."""
    scene.device.room.release_idle()
    scene.memory.host.release_idle()


def trim(scene: Scene) -> None:
    """Free slabs are given back."""
    spill(scene)
    scene.memory.trim(all_free=True)


ACTS: tuple[Callable[[Scene], None], ...] = (
    spill,
    give_up,
    give_up_early,
    cancel,
    promote,
    pack_device,
    pack_free,
    pack_host,
    release_idle,
    trim,
)


def play(read: str, act: Callable[[Scene], None], place: int) -> bool:
    """Act at one place of a read. Raises where that reads anything else. False if there is no such place."""
    with pytest.MonkeyPatch.context() as patch:
        turns = Once(place)
        host_attention, reading = READS[read]
        scene = Scene(turns, host_attention=host_attention)
        check_lock(patch, turns)

        def acting() -> None:
            with scene.memory.lock, contextlib.suppress(BudgetError):  # there may be too little that can move
                act(scene)

        turns.run([turns.read(lambda: reading(scene)), acting])
        scene.memory.check_integrity()
        READS["copied"][1](scene)
        scene.cache.close()
        scene.memory.close()
        return turns.done


def scenes() -> Iterator[tuple[str, Callable[[Scene], None]]]:
    """All reads and acts."""
    return ((read, act) for read in READS for act in ACTS)
