"""GB/s between host and device: plain copies of page-locked memory by chunk size, and what kvtier reaches.

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
from benchmarks.harness import Bench, Start, synchronize
from benchmarks.records import size
from benchmarks.scenarios.update import WARM_UP_STEPS, UpdateSession

SUMMARY = "GB/s between host and device: plain copies by chunk size, and kvtier's fetches"
CONTEXTS = (32768,)
CHUNKS = tuple(64 * 2**10 * 4**i for i in range(6))  # 64 KiB .. 64 MiB
BLOCK_SIZES = (16, 64, 256)
BASE = f"fetch {size(CHUNKS[-1])}"

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
