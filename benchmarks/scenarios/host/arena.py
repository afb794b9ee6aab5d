"""Memory to read from, problems laid out in it, and calls that rotate through it so that no CPU cache serves them."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cores import torch_threads
from kvtier.config import HOST_BLOCK
from kvtier.cpu import build, native
from kvtier.memory.storage.slabs import Budget, SlabAllocator

#: Bytes through which every turn rotates, so that keys and values come from memory and not from a cache.
ARENA = 2**30
VARIANTS = 5
#: A turn repeats its call for this time.
TURN_SECONDS = 0.15
STREAM = Path(__file__).resolve().parents[2] / "native" / "stream.cpp"


@dataclass(frozen=True)
class Shape:
    """One problem. `lengths` are the tokens of each sequence."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    threads: int = 1
    block_size: int = HOST_BLOCK
    queries: int = 1

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return 2 * self.kv_heads * self.block_size * self.dim * self.dtype.itemsize

    @property
    def blocks(self) -> list[int]:
        """Blocks of each sequence."""
        return [-(-n // self.block_size) for n in self.lengths]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that one call reads."""
        return sum(self.lengths) * 2 * self.kv_heads * self.dim * self.dtype.itemsize

    def fields(self) -> dict[str, Any]:
        """For a record."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "batch": len(self.lengths),
            "tokens": max(self.lengths),
            "ragged": len(set(self.lengths)) > 1,
            "threads": self.threads,
            "block_size": self.block_size,
        } | ({"queries": self.queries} if self.queries > 1 else {})

    def __str__(self) -> str:
        tokens = f"{max(self.lengths):,} tokens" if len(set(self.lengths)) == 1 else "ragged"
        dtype = str(self.dtype).removeprefix("torch.")
        blocks = f" in blocks of {self.block_size}" if self.block_size != HOST_BLOCK else ""
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        heads = f"{self.heads}/{self.kv_heads} heads of {self.dim}"
        return f"{dtype}, {heads}, {len(self.lengths)} x {tokens}{blocks}{queries}"


Make = Callable[["Arena", Shape], Iterator[Callable[[], Any]]]


class Arena:
    """Memory on huge pages, filled with random numbers in each dtype in turn."""

    def __init__(self) -> None:
        self.memory = SlabAllocator(torch.device("cpu"), Budget("host", 2 * ARENA))
        data = self.memory.allocate(ARENA)
        assert data is not None
        self.data = data
        self.dtype: torch.dtype | None = None
        self.best = native.instruction_set()
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stream.so"
            options = ["-O3", "-std=c++17", "-march=native", "-w", "-shared", "-fPIC", "-pthread"]
            command = [*build.compiler(), *options, str(STREAM), "-o", str(library)]
            subprocess.run(command, check=True)
            self.stream = ctypes.CDLL(str(library)).stream
        self.stream.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        # The threads that the kernel borrows too: a second team would compete with them for the cores.
        self.team = native.torch_team()

    def fill(self, dtype: torch.dtype) -> None:
        """Random normal numbers of a dtype throughout."""
        if self.dtype is not dtype:
            numbers = self.data.view(dtype)
            some = torch.randn(2**20).to(dtype)
            numbers.view(-1, 2**20).copy_(some.expand(numbers.numel() // 2**20, -1))
            self.dtype = dtype

    def close(self) -> None:
        """Give the memory back."""
        self.memory.release(self.data)


class Rotating:
    """Repeats a call for a while, each time on other bytes, with torch on the shape's number of threads."""

    def __init__(self, shape: Shape, calls: list[Callable[[], Any]]) -> None:
        self.shape = shape
        self.calls = calls
        self.at = 0
        with torch_threads(shape.threads):
            for call in calls[:2]:
                call()

    def measure(self) -> float:
        """GB/s, the median of the calls of one turn."""
        values: list[float] = []
        with torch_threads(self.shape.threads):
            began = time.perf_counter()
            while not values or time.perf_counter() - began < TURN_SECONDS:
                call = self.calls[self.at % len(self.calls)]
                self.at += 1
                start = time.perf_counter()
                call()
                values.append(self.shape.nbytes / (time.perf_counter() - start) / 1e9)
        return sorted(values)[len(values) // 2]

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Drop what the calls hold."""
        self.calls.clear()


class Ceiling(Rotating):
    """The best variant of reading, on the shape's number of threads, chosen in this run."""

    def __init__(self, arena: Arena, shape: Shape) -> None:
        arena.fill(shape.dtype)
        size = shape.nbytes // 4096 * 4096
        starts = range(0, ARENA - size + 1, size)

        def reads(variant: int) -> list[Callable[[], Any]]:
            base = arena.data.data_ptr()
            return [partial(arena.stream, base + x, size, variant, shape.threads, arena.team) for x in starts]

        rates = {v: Rotating(shape, reads(v)).measure() for v in range(VARIANTS)}
        self.variant = max(rates, key=lambda v: rates[v])
        super().__init__(shape, reads(self.variant))

    def facts(self) -> dict[str, Any]:
        """Which variant."""
        return {"variant": self.variant}


class Call(Rotating):
    """A contender, on as many copies of the problem as the arena holds."""

    def __init__(self, arena: Arena, shape: Shape, make: Make) -> None:
        arena.fill(shape.dtype)
        self.arena = arena
        super().__init__(shape, list(make(arena, shape)))
