"""GB/s of the device's kernels: paged decode, torch's attention and a plain copy; block copies over the link.

Keys and values are random and larger than any cache of the device. A copy's bytes are those read and those written,
attention's those read: what all of them are held against is how fast the device's memory is. On a CPU, Triton's
interpreter stands in at tiny sizes, which shows that everything runs and is no measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.harness import Bench
from benchmarks.records import size
from benchmarks.turns import Start, synchronize
from kvtier.config import DEVICE_BLOCK
from kvtier.kernels import copies, launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

SUMMARY = "GB/s of the device's kernels: paged decode, merges, block copies over the link"
COPY = "copy on the device"
#: A turn goes through so many bytes, some 10 ms of a device's memory; what is slower, for about so many seconds.
TURN_BYTES = 32 * 2**30
TURN_SECONDS = 0.05
LINK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Shape:
    """One call of attention."""

    batch: int
    tokens: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = DEVICE_BLOCK
    dtype: torch.dtype = torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.batch * self.tokens * self.kv_heads * self.dim * self.dtype.itemsize

    def __str__(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}, {self.batch} x {self.tokens:,} tokens{queries}"

    def fields(self) -> dict[str, Any]:
        """For a record."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "batch": self.batch,
            "context": self.tokens,
            "queries": self.queries,
            "block_size": self.block_size,
            "model": "kernels",
        }


class Repeated:
    """A call that is repeated for a turn, on other bytes each time where there are several."""

    def __init__(
        self,
        device: torch.device,
        calls: list[Callable[[], Any]],
        nbytes: int,
        turn_bytes: int,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.device = device
        self._facts = facts or {}
        self.calls = calls
        self.nbytes = nbytes
        for call in calls:  # programs are compiled
            call()
        synchronize(device)
        began = time.perf_counter()
        for call in calls:
            call()
        synchronize(device)
        each = (time.perf_counter() - began) / len(calls)
        self.turns = max(1, min(turn_bytes // nbytes, int(TURN_SECONDS / each)))

    def measure(self) -> float:
        """GB/s."""
        synchronize(self.device)
        began = time.perf_counter()
        for i in range(self.turns):
            self.calls[i % len(self.calls)]()
        synchronize(self.device)
        return self.turns * self.nbytes / (time.perf_counter() - began) / 1e9

    def facts(self) -> dict[str, Any]:
        """Bytes of a call; of ours its tile, and the microseconds of those that calibration measured; of torch's its
        backend."""
        return {**self._facts, "nbytes": self.nbytes}

    def close(self) -> None:
        """Drop what is held."""
        self.calls.clear()


def run(bench: Bench) -> None:
    """Run the scenario."""
    settings = bench.settings
    device = settings.device
    cuda = device.type == "cuda"
    if not launch.available(device):
        how = "" if cuda else f": TRITON_INTERPRET=1 {launch.VARIABLE}=triton lets its interpreter stand in"
        print(f"kernels: Triton does not run here{how}\n", flush=True)
        return
    tiny = not cuda or settings.quick
    turn = 2**16 if tiny else TURN_BYTES
    # Time may run out: first the shape that matters most, and what compiles one small program.
    first, *others = _tiny_shapes() if tiny else _shapes()
    run_attention(bench, first, turn)
    run_link(bench, tiny=tiny)
    for shape in others:
        run_attention(bench, shape, turn)


def run_link(bench: Bench, *, tiny: bool) -> None:
    """Copies over the link by chunk size: one by one, and by one launch."""
    device = bench.settings.device
    total = 2**16 if tiny else LINK_BYTES
    for chunk in (2**12, 2**14) if tiny else (2**14, 2**16, 2**18, 2**20, 2**22):
        links: dict[str, Start] = {}
        for name, kernel, up in (
            ("copies, up", False, True),
            ("kernel, up", True, True),
            ("copies, down", False, False),
            ("kernel, down", True, False),
        ):
            links[name] = partial(_link, device, chunk, total, kernel=kernel, up=up)
        workload = {"chunk_bytes": chunk, "context": chunk, "model": "link"}
        bench.compare_plain(
            "kernels",
            f"blocks of {size(chunk)} over the link",
            links,
            unit="GB/s",
            rounds=bench.rounds(5),
            base="copies, up",
            workload=workload,
        )


def run_attention(bench: Bench, shape: Shape, turn: int) -> None:
    """One shape: paged attention, a copy of as many bytes, and torch's attention on dense tensors."""
    device = bench.settings.device
    ours: dict[str, Start] = {
        COPY: partial(_copy, device, shape, turn),
        "paged": partial(_paged, device, shape, turn),
        # Without the time that Python takes to launch.
        **({"paged, as a graph": partial(_paged_graph, device, shape, turn)} if device.type == "cuda" else {}),
        "paged, one part": partial(_paged, device, shape, turn, parts=1),
        "sdpa, dense": partial(_sdpa, device, shape, turn),
    }
    bench.compare_plain(
        "kernels",
        str(shape),
        ours,
        unit="GB/s",
        rounds=bench.rounds(5),
        base=COPY,
        workload=shape.fields(),
        note=lambda facts: facts.get("tile") or facts.get("backend", ""),
    )


def _shapes() -> list[Shape]:
    return [
        *(Shape(1, tokens) for tokens in (32768, 4096, 8192, 131072)),
        Shape(16, 4096),
        Shape(16, 32768),
        Shape(1, 32768, block_size=16),
        Shape(1, 32768, block_size=256),
        Shape(1, 32768, heads=16),
        Shape(1, 32768, heads=8),
        Shape(1, 32768, queries=64),
        Shape(1, 32768, queries=1024),
    ]


def _tiny_shapes() -> list[Shape]:
    return [
        Shape(2, 40, heads=4, kv_heads=2, dim=16, block_size=16),
        Shape(1, 40, queries=20, heads=4, kv_heads=2, dim=16, block_size=16),
    ]


def _sets(shape: Shape) -> int:
    """Sets of keys and values that turns rotate through, so that none is in a cache."""
    return min(8, max(1, 2**29 // shape.nbytes))


def _copy(device: torch.device, shape: Shape, turn: int) -> Repeated:
    # Random as keys and values are: memory may be quicker with zeros.
    random = partial(torch.randint, 256, (shape.nbytes // 2,), dtype=torch.uint8, device=device)
    pairs = [(random(), random()) for _ in range(_sets(shape))]
    return Repeated(device, [partial(a.copy_, b) for a, b in pairs], shape.nbytes, turn)


def _paged(device: torch.device, shape: Shape, turn: int, parts: int | None = None) -> Repeated:
    layout = BlockLayout(shape.kv_heads, shape.kv_heads, shape.dim, shape.dim, shape.block_size, shape.dtype)
    blocks = -(-shape.tokens // shape.block_size)
    query = torch.randn(shape.batch, shape.heads, shape.queries, shape.dim, device=device).to(shape.dtype)
    params = AttentionParams(shape.dim**-0.5, causal=True)
    calls = []
    for _ in range(_sets(shape)):
        slab = torch.randn(shape.batch * blocks, layout.nbytes // shape.dtype.itemsize, device=device).to(shape.dtype)
        # Blocks of a sequence are scattered.
        order = torch.randperm(shape.batch * blocks, device=device).view(shape.batch, blocks)
        table = AddressTable(slab.data_ptr() + order * layout.nbytes)

        def call(table: AddressTable = table, keep: torch.Tensor = slab) -> None:
            paged.attend(query, table, layout, shape.tokens, params, parts=parts)

        calls.append(call)
    return Repeated(device, calls, shape.nbytes, turn, _tile(device, shape, layout))


def _tile(device: torch.device, shape: Shape, layout: BlockLayout) -> dict[str, Any]:
    """The tile of such calls, and what calibration measured for it, for a record."""
    choice = paged.choice(layout, device, shape.heads, shape.queries)
    measured = {str(option): seconds * 1e6 for option, seconds in choice.seconds.items() if seconds < float("inf")}
    return {"tile": str(choice.option), "calibrated": bool(choice.seconds), "tried_us": measured}


def _paged_graph(device: torch.device, shape: Shape, turn: int) -> Repeated:
    eager = _paged(device, shape, turn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in eager.calls:
            call()
    keep = list(eager.calls)  # what the graph reads

    def replay(keep: object = keep) -> None:
        graph.replay()

    return Repeated(device, [replay], shape.nbytes * len(keep), turn, eager.facts())


def _sdpa(device: torch.device, shape: Shape, turn: int) -> Repeated:
    query = torch.randn(shape.batch, shape.heads, shape.queries, shape.dim, device=device).to(shape.dtype)
    group = shape.heads // shape.kv_heads
    mask = None
    if shape.queries > 1:
        at = torch.arange(shape.tokens - shape.queries, shape.tokens, device=device)[:, None]
        mask = torch.arange(shape.tokens, device=device) <= at
    calls = []
    for _ in range(_sets(shape)):
        keys, values = (
            torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim, device=device).to(shape.dtype)
            for _ in range(2)
        )
        calls.append(partial(F.scaled_dot_product_attention, query, keys, values, attn_mask=mask, enable_gqa=group > 1))
    # A mask, or groups of heads, may leave torch only its slowest way.
    chosen = torch._fused_sdp_choice(query, keys, values, mask, 0.0, False, enable_gqa=group > 1)
    return Repeated(device, calls, shape.nbytes, turn, {"backend": SDPBackend(chosen).name.lower()})


def _link(device: torch.device, chunk: int, total: int, *, kernel: bool, up: bool) -> Repeated:
    cuda = device.type == "cuda"
    host = torch.zeros(total, dtype=torch.uint8, pin_memory=cuda)
    near = torch.zeros(total, dtype=torch.uint8, device=device)
    target, source = (near, host) if up else (host, near)
    if not kernel:
        pairs = list(zip(target.split(chunk), source.split(chunk), strict=True))

        def call() -> None:
            for a, b in pairs:
                a.copy_(b, non_blocking=True)

    else:
        offsets = torch.arange(0, total, chunk, device=device)
        sources, targets = source.data_ptr() + offsets, target.data_ptr() + offsets

        def call(keep: object = (host, near)) -> None:  # the addresses alone keep nothing alive
            copies.copy_blocks(sources, targets, chunk)

    return Repeated(device, [call], total, total)
