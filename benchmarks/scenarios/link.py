"""GB/s between host and device: plain copies of page-locked memory by chunk size, and what kvtier reaches.

Scattered blocks are copied three ways: one by one by the copy engine, all by one launch that reads and writes host
memory by address, and as transfers choose by the machine's profile. The Python that issues them counts.

kvtier's figure is seen from outside: a cache of which only a tenth fits on the device decodes, layer after layer and
without a model; the bytes that it fetched are divided by all of the time. On a CPU, both sides are RAM.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import Case, Contender, contender, tier_facts
from benchmarks.harness import Bench
from benchmarks.records import size
from benchmarks.scenarios.update import WARM_UP_STEPS, UpdateSession
from benchmarks.turns import Start, synchronize
from kvtier.calibration.measurements.copies import check_mapped, scattered, scattered_pools
from kvtier.transfer.copies import Copy, TensorCopy
from kvtier.transfer.engine import Direction
from kvtier.transfer.launches import SIZES, Batch, Launches

SUMMARY = "GB/s between host and device: plain copies by chunk size, scattered blocks, and kvtier's fetches"
CONTEXTS = (32768,)
CHUNKS = tuple(64 * 2**10 * 4**i for i in range(6))  # 64 KiB .. 64 MiB
BLOCK_SIZES = (16, 64, 256)
BASE = f"fetch {size(CHUNKS[-1])}"

#: Of scattered blocks, and how many of them are copied at a time.
SCATTERED = (*SIZES, 2**22)
QUICK_SCATTERED = (2**12, 2**16)
COUNTS = (16, 128)
QUICK_COUNTS = (8,)
WAYS = ("copies", "launch", "chosen")

BUFFER_BYTES = 256 * 2**20
QUICK_BUFFER_BYTES = CHUNKS[-1]


class CopySession:
    """Copies a buffer in chunks, again and again.

    Args:
        device: one end.
        chunk: bytes of one copy.
        total: bytes of the buffers.
        fetch: host to device; else the other way.
    """

    def __init__(self, device: torch.device, chunk: int, total: int, *, fetch: bool) -> None:
        cuda = device.type == "cuda"
        host = torch.zeros(total, dtype=torch.uint8, pin_memory=cuda)
        near = torch.zeros(total, dtype=torch.uint8, device=device)
        self.device = device
        self.total = total
        self.turns = 4 if cuda else 1
        ends = (near, host) if fetch else (host, near)
        self.pairs = list(zip(*(end.split(chunk) for end in ends), strict=True))
        self.measure()

    def measure(self) -> float:
        """GB/s."""
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(self.turns):
            for destination, source in self.pairs:
                destination.copy_(source, non_blocking=True)
        synchronize(self.device)
        return self.turns * self.total / (time.perf_counter() - began) / 1e9

    def facts(self) -> dict[str, Any]:
        """The number of copies."""
        return {"chunk_bytes": self.pairs[0][0].nbytes}

    def close(self) -> None:
        """Drop the buffers."""
        self.pairs.clear()


class ScatterSession:
    """Copies single blocks between scattered slots of a pool of the device and one of the host.

    Args:
        device: one end.
        nbytes: of a block.
        count: of blocks in a transfer.
        direction: up or down.
        way: of `WAYS`.
    """

    def __init__(self, device: torch.device, nbytes: int, count: int, direction: Direction, way: str) -> None:
        self.device = device
        self.pools = scattered_pools(device, nbytes, 2 * count * nbytes)
        self.launches = Launches(device)
        copies = scattered(*self.pools, count, direction)
        self.nbytes = count * nbytes
        self.block = nbytes
        self.turns = max(4, 2**25 // self.nbytes) if device.type == "cuda" else 1
        self.alone: list[Copy | TensorCopy] = []
        self.together: list[list[Copy]] = []
        if way == "chosen":
            self.alone, self.together = self.launches.divide(copies, direction)
        elif way == "launch":
            if device.type == "cuda":  # elsewhere a launch is emulated
                check_mapped(copies)
            self.together = [copies]
        else:
            self.alone += copies
        self.measure()

    def measure(self) -> float:
        """GB/s of several transfers."""
        synchronize(self.device)
        batches: list[Batch] = []
        began = time.perf_counter()
        for _ in range(self.turns):
            mine = [self.launches.prepare(copies) for copies in self.together]
            batches += mine
            for copy in self.alone:
                copy.run(non_blocking=True)
            for batch in mine:
                self.launches.launch(batch)
        synchronize(self.device)
        seconds = time.perf_counter() - began
        self.launches.release(batches)
        return self.turns * self.nbytes / seconds / 1e9

    def facts(self) -> dict[str, Any]:
        """Bytes of a block, and how many blocks of a transfer went by a launch."""
        return {"chunk_bytes": self.block, "launched": sum(map(len, self.together))}

    def close(self) -> None:
        """Give the memory back."""
        self.alone.clear()
        self.together.clear()
        for pool in self.pools:
            pool.close()
        self.launches.close()


class FetchSession(UpdateSession):
    """A tiered cache that must fetch most of its KV at each step."""

    def measure(self) -> float:
        """GB/s of what was fetched."""
        before = tier_facts(self.cache)
        seconds = self.run_turn()
        after = tier_facts(self.cache)
        fetched, copies = (after[name] - before[name] for name in ("bytes_up", "copies_up"))
        self.chunk = fetched / max(copies, 1)
        return fetched / seconds / 1e9

    def facts(self) -> dict[str, Any]:
        """With the mean size of a copy."""
        return super().facts() | {"chunk_bytes": self.chunk}


def note(facts: dict[str, Any]) -> str:
    """How large a copy is."""
    return f"{size(facts['chunk_bytes'])} a copy"


def scattered_note(facts: dict[str, Any]) -> str:
    """How many blocks went by a launch."""
    return f"{facts['launched']:,} by a launch"


def run_scattered(bench: Bench) -> None:
    """Compare the ways to copy scattered blocks."""
    settings = bench.settings
    for nbytes in QUICK_SCATTERED if settings.quick else SCATTERED:
        for count in QUICK_COUNTS if settings.quick else COUNTS:
            starts: dict[str, Start] = {}
            bases: dict[str, str] = {}
            for direction, word in ((Direction.FETCH, "fetch"), (Direction.WRITE_BACK, "write back")):
                for way in WAYS:
                    trial = partial(ScatterSession, settings.device, nbytes, count, direction, way)
                    starts[f"{word}, {way}"] = trial
                    bases[f"{word}, {way}"] = f"{word}, {WAYS[0]}"
            bench.compare_plain(
                "link",
                f"{count} scattered blocks of {size(nbytes)}",
                starts,
                unit="GB/s",
                rounds=bench.rounds(5),
                base=bases,
                note=scattered_note,
                workload={"chunk_bytes": nbytes, "blocks": count, "context": nbytes, "model": "link"},
            )


def run(bench: Bench) -> None:
    """Run the scenario."""
    settings = bench.settings
    steps, rounds = bench.tokens(4), bench.rounds(5)
    total = QUICK_BUFFER_BYTES if settings.quick else BUFFER_BYTES
    for model in bench.model_names("llama-3.1-8b"):
        for case in bench.cases("link", model, CONTEXTS, WARM_UP_STEPS + rounds * steps):
            starts: dict[str, tuple[Contender | None, Start]] = {}
            for fetch, word in ((True, "fetch"), (False, "write back")):
                for chunk in CHUNKS:
                    trial = partial(CopySession, settings.device, chunk, total, fetch=fetch)
                    starts[f"{word} {size(chunk)}"] = (None, trial)
            spilled = contender("fetch@10%")
            for block_size in BLOCK_SIZES:
                sized: Case = replace(case, block_size=block_size)
                starts[f"kvtier, blocks of {block_size}"] = (spilled, partial(FetchSession, spilled, sized, steps))
            bench.compare("link", model, case, starts, unit="GB/s", rounds=rounds, base=BASE, note=note)
    run_scattered(bench)  # last, for time may run out: there are many
