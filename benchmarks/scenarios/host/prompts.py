"""Many queries over a long past: in place, against torch's kernel on dense tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cores import torch_threads, words
from benchmarks.harness import Bench
from benchmarks.scenarios.host.arena import Arena, Make, Shape
from benchmarks.scenarios.host.calls import native_shape, random_query, tables, without_tiles
from benchmarks.turns import Start
from kvtier.cpu import native
from kvtier.kernels.params import AttentionParams

BASE = "sdpa, dense"


def causal_mask(shape: Shape) -> torch.Tensor:
    """What Transformers passes for a prompt behind a past: `[1, 1, queries, tokens]`, boolean."""
    seen = torch.ones(shape.queries, shape.lengths[0], dtype=torch.bool)
    return seen.tril(shape.lengths[0] - shape.queries)[None, None]


def _blocks(arena: Arena, shape: Shape) -> torch.Tensor:
    """`[blocks, 2, kv_heads, block_size, dim]`: the first copy of the problem."""
    count = shape.blocks[0]
    numbers = arena.data.view(shape.dtype)[: count * shape.block_bytes // shape.dtype.itemsize]
    return numbers.view(count, 2, shape.kv_heads, shape.block_size, shape.dim)


def _gathered(blocks: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """Keys and values `[1, heads, tokens, dim]`, a head for each query head, as Transformers gives them to torch."""
    tokens, repeats = shape.lengths[0], shape.heads // shape.kv_heads
    dense = (blocks[:, which].transpose(0, 1).reshape(1, shape.kv_heads, -1, shape.dim) for which in (0, 1))
    return [x[:, :, :tokens].repeat_interleave(repeats, 1) for x in dense]


def in_place(instruction_set: str | None = None) -> Make:
    """The native kernel on blocks."""

    def make(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
        layout, query = native_shape(shape), random_query(shape)
        params = AttentionParams(shape.dim**-0.5, mask=causal_mask(shape))
        table = next(iter(tables(arena, shape)))

        def call() -> None:
            native.use_instruction_set(instruction_set or arena.best)
            native.attend(layout, query, table, params, threads=shape.threads)
            native.use_instruction_set(arena.best)

        yield call

    return make


def dense(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """torch's kernel on tensors that are dense already, heads repeated."""
    query, mask = random_query(shape), causal_mask(shape)
    keys, values = _gathered(_blocks(arena, shape), shape)
    yield lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def made_dense(arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
    """The same from blocks: gathered and repeated first, as any operation on a view does."""
    query, mask, blocks = random_query(shape), causal_mask(shape), _blocks(arena, shape)
    yield lambda: F.scaled_dot_product_attention(query, *_gathered(blocks, shape), attn_mask=mask)


class Prompt:
    """Repeats a call. It is long, and limited by arithmetic: whether a cache serves some of it does not matter."""

    def __init__(self, arena: Arena, shape: Shape, make: Make) -> None:
        arena.fill(shape.dtype)
        self.threads = shape.threads
        self.calls = list(make(arena, shape))
        self.measure()

    def measure(self) -> float:
        """Milliseconds of one call."""
        with torch_threads(self.threads):
            began = time.perf_counter()
            self.calls[0]()
            return (time.perf_counter() - began) * 1e3

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Drop what the call holds."""
        self.calls.clear()


def problems(*, quick: bool) -> Iterator[Shape]:
    """Chunks of a prompt behind a long past, and shorter ones."""
    chunk = Shape(torch.bfloat16, 32, 8, 128, (16384 + 512,), queries=512, threads=torch.get_num_threads())
    if quick:
        yield replace(chunk, lengths=(1024,), queries=64)
        return
    yield chunk
    yield replace(chunk, threads=1, heads=8, kv_heads=2)
    for dtype in (torch.float32, torch.float16):
        yield replace(chunk, dtype=dtype, heads=8, kv_heads=2)
    for heads, kv_heads in ((8, 8), (8, 1)):
        yield replace(chunk, heads=heads, kv_heads=kv_heads, lengths=(4096 + 512,))
    for queries in (32, 128):
        yield replace(chunk, lengths=(4096 + queries,), queries=queries)
    yield replace(chunk, block_size=16, lengths=(4096 + 512,))
    yield replace(chunk, dim=64, lengths=(4096 + 512,))


def run_prompts(bench: Bench, arena: Arena) -> None:
    """Every contender on every problem."""
    for shape in problems(quick=bench.settings.quick):
        contenders: dict[str, Make] = {BASE: dense, "sdpa, made dense": made_dense, "kvtier, in place": in_place()}
        if shape.dtype is torch.bfloat16:
            contenders |= without_tiles(in_place)
        starts: dict[str, Start] = {name: partial(Prompt, arena, shape, make) for name, make in contenders.items()}
        bench.compare_plain(
            "host",
            f"{shape}, all on {words(shape.threads)}",
            starts,
            unit="ms",
            rounds=bench.rounds(5),
            base=BASE,
            workload=shape.fields() | {"prompt": 1},
        )
