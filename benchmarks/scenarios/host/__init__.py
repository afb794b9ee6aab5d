"""Decode attention on the host: GB/s of keys and values, as a share of the best streaming read of the same bytes.

llama     a layer of Llama 3.1 8B at 32k tokens, on as many threads as torch uses
shapes    numbers of heads, contexts, batches, dtypes, head sizes, block sizes and instruction sets, on one thread
prefetch  each way to prefetch, and what is learned, on one thread, and one shape on all cores
threads   one thread against several, and how far memory itself goes along
busy      all cores against one core less, while another process is busy on one core
submit    how soon `submit` returns, and how much Python gets done meanwhile
prompts   chunks of a prompt over a long past, in place, against torch's kernel on dense tensors
phases    how the kernel's time is split over keys, softmax and values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.cores import words
from benchmarks.harness import Bench
from benchmarks.scenarios.host import phases, prompts, submit, threads
from benchmarks.scenarios.host.arena import Arena, Call, Ceiling, Make, Shape
from benchmarks.scenarios.host.calls import ours, prefetching, sdpa, torch_blocks, transformers_path, without_tiles
from benchmarks.turns import Start
from kvtier.cpu import native

SUMMARY = "decode attention on the host, as a share of the memory's speed"
CEILING = "ceiling"


def run(bench: Bench) -> None:
    """Run the scenario."""
    if not native.available():
        print("host: the native kernel is not in use here; `kvtier env` says why", flush=True)
        return
    arena = Arena()
    try:
        for name, case in _CASES.items():
            if bench.selected(name):
                case(bench, arena)
    finally:
        arena.close()


def run_llama(bench: Bench, arena: Arena) -> None:
    """What attention on the host reads in a decode step of that model."""
    tokens = 1024 if bench.settings.quick else 32768
    shape = Shape(torch.bfloat16, 32, 8, 128, (tokens,), threads=torch.get_num_threads())
    bench.compare_plain(
        "host",
        f"{shape}, {words(shape.threads)}",
        {CEILING: partial(Ceiling, arena, shape), "kvtier": partial(Call, arena, shape, ours())},
        unit="GB/s",
        rounds=bench.rounds(9),
        base=CEILING,
        workload=shape.fields() | {"model": "llama-3.1-8b", "context": tokens},
    )


def run_shapes(bench: Bench, arena: Arena) -> None:
    """Compare the kernel with the ceiling and with torch."""
    for shape, contenders in problems(quick=bench.settings.quick):
        _compare(bench, arena, shape, contenders)


def run_prefetch(bench: Bench, arena: Arena) -> None:
    """Compare who fetches keys and values: instructions of the kernel, the hardware, or the one that is learned."""
    for shape, instruction_set in prefetched(quick=bench.settings.quick):
        ways = {f"kvtier, {way}": prefetching(way, instruction_set) for way in ("software", "hardware", "learned")}
        _compare(bench, arena, shape, ways, instruction_set)


def _compare(
    bench: Bench, arena: Arena, shape: Shape, contenders: dict[str, Make], instruction_set: str | None = None
) -> None:
    starts: dict[str, Start] = {name: partial(Call, arena, shape, one) for name, one in contenders.items()}
    bench.compare_plain(
        "host",
        f"{shape}, all on {words(shape.threads)}" + (f", {instruction_set}" if instruction_set else ""),
        {CEILING: partial(Ceiling, arena, shape)} | starts,
        unit="GB/s",
        rounds=bench.rounds(9),
        base=CEILING,
        workload=shape.fields() | ({"instruction_set": instruction_set} if instruction_set else {}),
    )


_CASES: dict[str, Callable[[Bench, Arena], None]] = {
    "llama": run_llama,
    "shapes": run_shapes,
    "prefetch": run_prefetch,
    "threads": threads.run_threads,
    "busy": threads.run_busy,
    "submit": submit.run_submit,
    "prompts": prompts.run_prompts,
    "phases": phases.run_phases,
}
CASES = tuple(_CASES)


def problems(*, quick: bool) -> Iterator[tuple[Shape, dict[str, Make]]]:
    """What is measured on one thread, and who takes part."""
    usual = Shape(torch.bfloat16, 32, 8, 128, (4096,))
    kernel: dict[str, Make] = {"kvtier": ours()}
    torches: dict[str, Make] = {"sdpa": sdpa, "transformers": transformers_path, "kvtier, torch": torch_blocks}
    if quick:
        yield replace(usual, lengths=(1024,)), kernel | torches
        return
    heads = ((32, 8), (16, 8), (32, 32))
    for query_heads, kv_heads in heads:
        for tokens in (1024, 4096, 16384, 65536):
            some = torches if tokens in (1024, 16384) else {"sdpa": sdpa}
            yield replace(usual, heads=query_heads, kv_heads=kv_heads, lengths=(tokens,)), kernel | some
    for batch, tokens in ((2, 4096), (4, 4096), (8, 4096), (16, 4096), (4, 16384), (16, 16384)):
        yield replace(usual, lengths=(tokens,) * batch), kernel | {"sdpa": sdpa}
    ragged = (1024, 2048, 3072, 4096, 6000, 1500, 1024, 2500, 65536, 5000, 1024, 8192, 1024, 12000, 1024, 2048)
    even = (sum(ragged) // 16,) * 16
    yield replace(usual, lengths=ragged), kernel
    yield replace(usual, lengths=even), kernel
    for dtype in (torch.float16, torch.float32):
        for query_heads, kv_heads in heads:
            shape = replace(usual, dtype=dtype, heads=query_heads, kv_heads=kv_heads, lengths=(16384,))
            yield shape, kernel | {"sdpa": sdpa}
    sets = {f"kvtier, {name}": ours(name) for name in ("avx512_bf16", "avx512", "avx2", "portable") if _has(name)}
    yield replace(usual, lengths=(16384,)), kernel | sets
    # With AMX, bf16 takes it from 7 rows to a KV head on.
    for query_heads, kv_heads in ((64, 8), (28, 4), (8, 1)):
        shape = replace(usual, heads=query_heads, kv_heads=kv_heads, lengths=(16384,))
        yield shape, kernel | without_tiles() | {"sdpa": sdpa}
    yield replace(usual, dtype=torch.float16, heads=64, lengths=(16384,)), kernel | {"sdpa": sdpa}
    for queries in (2, 4, 16):
        yield replace(usual, queries=queries, lengths=(16384,)), kernel | without_tiles() | {"sdpa": sdpa}
    for dim in (64, 80, 96, 256):
        yield replace(usual, dim=dim, lengths=(8192,)), kernel | {"sdpa": sdpa}
    for block_size in (16, 64, 128, 512):
        yield replace(usual, block_size=block_size, lengths=(16384,)), kernel | {"sdpa": sdpa}


def prefetched(*, quick: bool) -> Iterator[tuple[Shape, str | None]]:
    """What is measured, and with which instruction set: None, the best one."""
    usual = Shape(torch.bfloat16, 32, 8, 128, (1024 if quick else 16384,))
    yield usual, None
    if quick:
        return
    for heads, kv_heads in ((16, 8), (32, 32), (64, 8)):
        yield replace(usual, heads=heads, kv_heads=kv_heads), None
    for block_size in (16, 64):
        yield replace(usual, block_size=block_size), None
    yield replace(usual, dim=64), None
    yield replace(usual, lengths=(1024,)), None
    yield replace(usual, threads=torch.get_num_threads()), None
    for dtype in (torch.float16, torch.float32):
        yield replace(usual, dtype=dtype), None
    yield replace(usual, dtype=torch.float32, kv_heads=32), None
    for name in ("avx512", "avx2"):
        if _has(name):
            yield usual, name


def _has(name: str) -> bool:
    best = native.instruction_set()
    found = native.library().kvtier_use_instruction_set(name.encode()) == 0
    native.use_instruction_set(best)
    return found
