"""The contenders of this scenario: each makes calls on every copy of a problem that the arena holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.scenarios.host.arena import ARENA, Arena, Make, Shape
from kvtier.cpu import fallback, native
from kvtier.kernels.params import AttentionParams


def random_query(shape: Shape) -> torch.Tensor:
    """`[batch, heads, queries, dim]`."""
    return torch.randn(len(shape.lengths), shape.heads, shape.queries, shape.dim).to(shape.dtype)


def tables(arena: Arena, shape: Shape) -> Iterator[native.Sequences]:
    """The blocks of every copy of the problem, each sequence as one run."""
    size = sum(shape.blocks) * shape.block_bytes
    base = arena.data.data_ptr()
    for start in range(base, base + max(ARENA - size, 0) + 1, size):
        table, at = native.Sequences(len(shape.lengths), shape.block_bytes, keep=arena.data), start
        for row, count in enumerate(shape.blocks):
            table.set_runs(row, [(at, 0, count)])
            at += count * shape.block_bytes
        table.set_lengths(shape.lengths)
        yield table


def native_shape(shape: Shape) -> native.Shape:
    """The same for the kernel."""
    return native.Shape(shape.dtype, shape.kv_heads, shape.dim, shape.dim, shape.block_size)


def ours(instruction_set: str | None = None, *, own_threads: bool = False) -> Make:
    """The native kernel, on the shape's number of threads: those of torch's OpenMP runtime, or the library's own."""

    def make(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
        layout, query = native_shape(shape), random_query(shape)
        params = AttentionParams(shape.dim**-0.5, causal=shape.queries > 1)

        def call(table: native.Sequences) -> None:
            native.attend(layout, query, table, params, threads=shape.threads)

        def forced(table: native.Sequences) -> None:
            assert instruction_set is not None
            native.use_instruction_set(instruction_set)
            call(table)
            native.use_instruction_set(arena.best)

        def own(table: native.Sequences) -> None:
            # The thread that waits takes part.
            native.submit(layout, query, table, params, threads=shape.threads - 1).wait()

        chosen = own if own_threads else forced if instruction_set else call
        for table in tables(arena, shape):
            yield partial(chosen, table)

    return make


def prefetching(way: str, instruction_set: str | None = None) -> Make:
    """The native kernel, which prefetches in one of its ways."""

    def make(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
        def forced(call: Callable[[], Any]) -> None:
            native.use_prefetch(way)
            call()
            native.use_prefetch("learned")

        for call in ours(instruction_set)(arena, shape):
            yield partial(forced, call)

    return make


def without_tiles(make: Callable[[str], Make] = ours) -> dict[str, Make]:
    """The native kernel without AMX, where it has that."""
    return {"kvtier, avx512_bf16": make("avx512_bf16")} if native.instruction_set() == "amx_bf16" else {}


def _dense(arena: Arena, shape: Shape) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batch, tokens = len(shape.lengths), shape.lengths[0]
    numbers = arena.data.view(shape.dtype)
    half = batch * shape.kv_heads * tokens * shape.dim
    for start in range(0, numbers.numel() - 2 * half + 1, 2 * half):
        views = (numbers[x : x + half].view(batch, shape.kv_heads, tokens, shape.dim) for x in (start, start + half))
        yield tuple(views)  # type: ignore[misc]


def sdpa(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """torch's own kernel on dense tensors, with its grouped heads."""
    query, grouped, mask = random_query(shape), shape.heads != shape.kv_heads, None
    if shape.queries > 1:
        seen = torch.ones(shape.queries, shape.lengths[0], dtype=torch.bool)
        mask = seen.tril(shape.lengths[0] - shape.queries)
    for keys, values in _dense(arena, shape):
        yield partial(F.scaled_dot_product_attention, query, keys, values, attn_mask=mask, enable_gqa=grouped)


def transformers_path(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """What Transformers does where there is a mask: heads repeated, then torch's kernel."""
    query, repeats = random_query(shape), shape.heads // shape.kv_heads
    mask = torch.ones(1, 1, 1, shape.lengths[0], dtype=torch.bool)

    def call(keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (keys, values))
        F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    for keys, values in _dense(arena, shape):
        yield partial(call, keys, values)


def torch_blocks(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """kvtier without its native library: torch's kernel, block by block."""
    query, params = random_query(shape), AttentionParams(shape.dim**-0.5)
    numbers = arena.data.view(shape.dtype)
    slot = shape.block_bytes // shape.dtype.itemsize
    blocks = numbers[: numbers.numel() // slot * slot].view(-1, 2, shape.kv_heads, shape.block_size, shape.dim)
    count = shape.blocks[0]
    for start in range(0, blocks.shape[0] - count + 1, count):
        some = blocks[start : start + count]
        yield partial(fallback.attend, query, [[(some[:, 0], some[:, 1])]] * len(shape.lengths), params)
