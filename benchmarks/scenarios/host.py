"""Decode attention on the host: GB/s of keys and values, as a share of the best streaming read of the same bytes."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import Bench, Start
from kvtier.config import HOST_BLOCK
from kvtier.cpu import build, fallback, native
from kvtier.kernels.terms import Terms
from kvtier.storage.memory import Budget, Memory

SUMMARY = "decode attention on the host, as a share of the memory's speed"
CEILING = "ceiling"
#: Bytes through which every turn rotates, so that keys and values come from memory and not from a cache.
ARENA = 2**30
VARIANTS = 5
#: A turn repeats its call for so many seconds.
TURN_SECONDS = 0.15


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
        }

    def __str__(self) -> str:
        tokens = f"{max(self.lengths):,} tokens" if len(set(self.lengths)) == 1 else "ragged"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.heads}/{self.kv_heads} heads of {self.dim}, {len(self.lengths)} x {tokens}"


def run(bench: Bench) -> None:
    """Compare the kernel with the ceiling and with torch."""
    if not native.available():
        print("host: the native library is not compiled", flush=True)
        return
    arena = Arena()
    try:
        for shape, contenders in problems(quick=bench.settings.quick):
            starts: dict[str, Start] = {
                name: partial(Call, arena, shape, contender) for name, contender in contenders.items()
            }
            bench.compare_plain(
                "host",
                f"{shape}, {shape.threads} thread{'s' * (shape.threads > 1)}",
                {CEILING: partial(Ceiling, arena, shape)} | starts,
                unit="GB/s",
                rounds=bench.rounds(9),
                base=CEILING,
                workload=shape.fields(),
            )
    finally:
        arena.close()


Make = Callable[["Arena", Shape], Callable[[], Any]]


def problems(*, quick: bool) -> Iterator[tuple[Shape, dict[str, Make]]]:
    """What is measured, and who takes part."""
    usual = Shape(torch.bfloat16, 32, 8, 128, (4096,))
    kernel: dict[str, Make] = {"kvtier": ours()}
    torches: dict[str, Make] = {"sdpa": sdpa, "transformers": transformers_path, "kvtier, torch": torch_blocks}
    if quick:
        yield replace(usual, lengths=(1024,)), kernel | torches
        return
    for heads, kv_heads in ((32, 8), (16, 8), (32, 32)):
        for tokens in (1024, 4096, 16384, 65536):
            some = torches if tokens in (1024, 16384) else {}
            yield replace(usual, heads=heads, kv_heads=kv_heads, lengths=(tokens,)), kernel | some
    for batch, tokens in ((4, 4096), (16, 4096), (4, 16384)):
        yield replace(usual, lengths=(tokens,) * batch), kernel
    ragged = (1024, 2048, 3072, 4096, 6000, 1500, 1024, 2500, 65536, 5000, 1024, 8192, 1024, 12000, 1024, 2048)
    even = (sum(ragged) // 16,) * 16
    yield replace(usual, lengths=ragged), kernel
    yield replace(usual, lengths=even), kernel
    for dtype in (torch.float16, torch.float32):
        yield replace(usual, dtype=dtype, lengths=(16384,)), kernel | {"sdpa": sdpa}
    sets = {f"kvtier, {name}": ours(name) for name in ("avx512_bf16", "avx512", "avx2", "portable") if _has(name)}
    yield replace(usual, lengths=(16384,)), kernel | sets
    for dim in (64, 80, 96, 256):
        yield replace(usual, dim=dim, lengths=(8192,)), kernel
    for block_size in (16, 64, 128, 512):
        yield replace(usual, block_size=block_size, lengths=(16384,)), kernel
    if torch.get_num_threads() > 1:
        for tokens in (1024, 16384):
            yield replace(usual, lengths=(tokens,), threads=2), kernel | {"kvtier, one thread": ours(threads=1)}


def _has(name: str) -> bool:
    return native.library().kvtier_use_instruction_set(name.encode()) == 0


class Arena:
    """Memory on huge pages, filled with random numbers in each dtype in turn."""

    def __init__(self) -> None:
        self.memory = Memory(torch.device("cpu"), Budget("host", 2 * ARENA))
        data = self.memory.allocate(ARENA)
        assert data is not None
        self.data = data
        self.dtype: torch.dtype | None = None
        self.best = native.instruction_set()
        source = Path(__file__).resolve().parent.parent / "native" / "stream.cpp"
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stream.so"
            command = [
                *build.compiler(),
                "-O3",
                "-march=native",
                "-w",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(library),
            ]
            subprocess.run(command, check=True)
            self.stream = ctypes.CDLL(str(library)).stream
        self.stream.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

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
    """Repeats a call for a while, each time on other bytes."""

    def __init__(self, shape: Shape, calls: list[Callable[[], Any]]) -> None:
        self.shape = shape
        self.calls = calls
        self.at = 0
        for call in calls[:2]:
            call()

    def measure(self) -> float:
        """GB/s, the median of the calls of one turn."""
        values = []
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
    """The best variant of reading, chosen in this run."""

    def __init__(self, arena: Arena, shape: Shape) -> None:
        arena.fill(shape.dtype)
        size = shape.nbytes // 4096 * 4096
        starts = range(0, ARENA - size + 1, size)

        def reads(variant: int) -> list[Callable[[], Any]]:
            return [partial(arena.stream, arena.data.data_ptr() + x, size, variant) for x in starts]

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
        super().__init__(shape, list(make(arena, shape)))  # type: ignore[call-overload]


def _query(shape: Shape) -> torch.Tensor:
    return torch.randn(len(shape.lengths), shape.heads, 1, shape.dim).to(shape.dtype)


def ours(instruction_set: str | None = None, threads: int | None = None) -> Make:
    """The native kernel."""

    def make(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
        query, terms = _query(shape), Terms(shape.dim**-0.5)
        blocks = native.Shape(shape.dtype, shape.kv_heads, shape.dim, shape.dim, shape.block_size)
        for start in _starts(arena, shape):
            lists, at = [], start
            for count in shape.blocks:
                lists.append([at + i * shape.block_bytes for i in range(count)])
                at += count * shape.block_bytes
            table = native.BlockList(lists)
            table.lengths.copy_(torch.tensor(shape.lengths))

            def call(table: native.BlockList = table) -> None:
                native.attend(blocks, query, table, terms, threads=threads or shape.threads)

            if instruction_set is None:
                yield call
            else:

                def forced(call: Callable[[], Any] = call) -> None:
                    native.use_instruction_set(instruction_set)
                    call()
                    native.use_instruction_set(arena.best)

                yield forced

    return make  # type: ignore[return-value]


def _starts(arena: Arena, shape: Shape) -> range:
    size = sum(shape.blocks) * shape.block_bytes
    base = arena.data.data_ptr()
    return range(base, base + max(ARENA - size, 0) + 1, size)


def _dense(arena: Arena, shape: Shape) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batch, tokens = len(shape.lengths), shape.lengths[0]
    numbers = arena.data.view(shape.dtype)
    half = batch * shape.kv_heads * tokens * shape.dim
    for start in range(0, numbers.numel() - 2 * half + 1, 2 * half):
        views = (numbers[x : x + half].view(batch, shape.kv_heads, tokens, shape.dim) for x in (start, start + half))
        yield tuple(views)  # type: ignore[misc]


def sdpa(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """torch's own kernel on dense tensors, with its grouped heads."""
    query = _query(shape)
    for keys, values in _dense(arena, shape):
        yield partial(F.scaled_dot_product_attention, query, keys, values, enable_gqa=shape.heads != shape.kv_heads)


def transformers_path(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """What Transformers does where there is a mask: heads repeated, then torch's kernel."""
    query, repeats = _query(shape), shape.heads // shape.kv_heads
    mask = torch.ones(1, 1, 1, shape.lengths[0], dtype=torch.bool)

    def call(keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (keys, values))
        F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    for keys, values in _dense(arena, shape):
        yield partial(call, keys, values)


def torch_blocks(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """kvtier without its native library: torch's kernel, block by block."""
    query, terms = _query(shape), Terms(shape.dim**-0.5)
    numbers = arena.data.view(shape.dtype)
    slot = shape.block_bytes // shape.dtype.itemsize
    blocks = numbers[: numbers.numel() // slot * slot].view(-1, 2, shape.kv_heads, shape.block_size, shape.dim)
    count = shape.blocks[0]
    for start in range(0, blocks.shape[0] - count + 1, count):
        some = blocks[start : start + count]
        run = fallback.Run(0, shape.block_size, count, some[:, 0], some[:, 1])
        yield partial(fallback.attend, query, [[run]] * len(shape.lengths), terms)
