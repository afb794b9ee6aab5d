"""What the Triton programs become without a GPU: run as a script, it compiles launches ahead of time and reports.

It is a process of its own, because a process either compiles Triton programs or interprets them. A request is a JSON
list of calls, each `{"call": "attend" | "merge" | "append" | "gather" | "copy_blocks", "target": 90, "tag": 0, ...}`;
the answer a JSON list of launches, `{"name", "tag", "key", "launcher", "stages", "registers", "stack", "shared",
"accesses": {"ld.b32": 9}, "ahead": 3}`; `launcher` is the same number where `launch.Launcher` launches what it launched
before, and `ahead` says how many asynchronous copies may be under way where the program waits for others.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvtier.kernels import copies, forms, launch, paged, tiles
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

#: The answer is the last line, behind this.
MARK = "compiled: "


@dataclass
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    launcher: int = -1


#: Every `launch.Launcher` that launched something; kept, so that none takes another one's place.
LAUNCHERS: list[launch.Launcher] = []


def report(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches of all requests, from a process that compiles."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(requests),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].removeprefix(MARK))


def environment() -> dict[str, str]:
    """Of a process that compiles."""
    root = str(Path(__file__).resolve().parents[2])
    return {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KVTIER_KERNELS")} | {
        "PYTHONPATH": root
    }


def record(request: dict[str, Any]) -> list[Launch]:
    """What a call would launch."""
    from kvtier.kernels import copy_programs, programs

    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launches.append(Launch(self.kernel, args, kwargs))

    def recorders(module: Any, *names: str) -> Any:
        return lambda: SimpleNamespace(**{name: Recorder(getattr(module, name)) for name in names})

    def launched(self: Any, count: int, *args: Any) -> None:
        if self not in LAUNCHERS:
            LAUNCHERS.append(self)
        kwargs = self._constants | self._options
        launches.append(Launch(self._program.kernel, args, kwargs, LAUNCHERS.index(self)))

    paged.available = copies.available = lambda device: True
    forms.programs = recorders(programs, "attend", "merge")
    copies.programs = recorders(copy_programs, "append", "gather", "copy")
    launch._processors = lambda device: request.get("processors", 132)
    launch.Launcher.__call__ = launched
    if request.get("afresh"):
        for kept in (forms._variants, forms._merges, copies._appends, copies._copies):
            kept.clear()
    if "candidate" in request:
        forms._variants.clear()
        tiles.chosen = functools.partial(chosen, request["candidate"])
    call(request)
    return launches


def chosen(candidate: int, kind: tiles.Kind, device: torch.device) -> tiles.Choice:
    """The candidate of that number, as if calibration had measured it to be the best."""
    return tiles.Choice(tiles.Option(kind.tiles[candidate], launch.PROGRAMS), {})


def call(request: dict[str, Any]) -> None:
    """Make the call that a request describes, on tensors whose contents are not read."""
    dtype = getattr(torch, request.get("dtype", "bfloat16"))
    kv_heads, group = request.get("kv_heads", 8), request.get("group", 4)
    k_dim = request.get("k_dim", 128)
    v_dim, size = request.get("v_dim", k_dim), request.get("block_size", 64)
    rows, queries, blocks = request.get("rows", 1), request.get("queries", 1), request.get("blocks", 64)
    layout = BlockLayout(kv_heads, kv_heads, k_dim, v_dim, size, dtype)
    integers = getattr(torch, request.get("integers", "int64"))
    heads = kv_heads * group
    addresses = torch.zeros((rows, blocks), dtype=torch.int64)
    table = AddressTable(
        addresses,
        torch.zeros(rows, dtype=torch.int32) if request.get("counts") else None,
        torch.zeros((rows, blocks), dtype=torch.int32) if request.get("positions") else None,
    )
    kind = request.get("mask")
    tokens = blocks * size - request.get("short", 0)
    mask = None if kind is None else torch.zeros((rows, 1, queries, tokens), dtype=getattr(torch, kind))
    if request["call"] == "attend":
        params = AttentionParams(
            0.1,
            softcap=request.get("softcap", 0.0),
            window=request.get("window", 0),
            causal=request.get("causal", False),
            mask=mask,
            first_valid=torch.zeros(rows, dtype=integers) if request.get("first_valid") else None,
            sinks=torch.zeros(heads) if request.get("sinks") else None,
            slopes=torch.zeros(heads) if request.get("slopes") else None,
        )
        lengths = torch.zeros(rows, dtype=integers) if request.get("lengths") else tokens
        if request.get("ragged"):
            cu = torch.zeros(rows + 1, dtype=torch.int32)
            query = torch.zeros((rows * queries, heads, k_dim), dtype=dtype)
            paged.attend(query, table, layout, lengths, params, cu_queries=cu, max_queries=queries)
        else:
            query = torch.zeros((rows, queries, heads, k_dim), dtype=dtype).transpose(1, 2)
            query = query.mT.contiguous().mT if request.get("columns") else query
            out = torch.empty((rows, heads, queries, v_dim), dtype=getattr(torch, request.get("out", "float32")))
            paged.attend(query, table, layout, lengths, params, out=out)
    elif request["call"] == "merge":
        parts = request.get("parts", 2)
        outs = torch.zeros((parts, rows, heads, queries, v_dim)), torch.zeros((parts, rows, heads, queries))
        # As far from each other as device memory and page-locked memory may be; it is not read.
        far = [[Far(x, request.get("apart", 0) * i) for i, x in enumerate(pair)] for pair in outs]
        paged.merge(list(zip(*far, strict=True)), dtype=dtype)
    elif request["call"] == "copy_blocks":
        copies.copy_blocks(addresses[0], addresses[0], layout.nbytes)
    else:
        shift = request.get("shift", 0)
        keys = torch.zeros((rows, queries, kv_heads, k_dim + shift), dtype=dtype)[..., shift:].transpose(1, 2)
        values = torch.zeros((rows, queries, kv_heads, v_dim), dtype=dtype).transpose(1, 2)
        if request["call"] == "append":
            starts = torch.zeros(rows, dtype=integers) if request.get("starts") else request.get("start", 0)
            cu = None
            if request.get("ragged"):
                keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
                cu = torch.zeros(rows + 1, dtype=torch.int32)
            copies.append(keys, values, addresses, layout, starts, cu_tokens=cu)
        else:
            copies.gather(table, layout, keys, values)


class Far(torch.Tensor):
    """A tensor that gives an address `apart` bytes from its own."""

    apart = 0

    @staticmethod
    def __new__(cls, x: torch.Tensor, apart: int) -> Far:
        made = x.as_subclass(cls)
        made.apart = apart
        return made

    def data_ptr(self) -> int:
        return super().data_ptr() + self.apart

    def contiguous(self, *_: object, **__: object) -> Far:
        return self

    def to(self, *_: object, **__: object) -> Far:
        return self


def specialise(launch: Launch, target: Any) -> tuple[str, Any, dict[str, Any]]:
    """Key of the compiled variant, source and options: as Triton's own launch makes them."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import compute_cache_key

    fn = launch.kernel
    kwargs = launch.kwargs | {"debug": False}
    backend, binder = binder_of(fn, target)
    bound, specialization, options = binder(*launch.args, **kwargs)
    key = compute_cache_key({}, specialization, options)
    options, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
    return str(key), ASTSource(fn, signature, constexprs, attrs), options.__dict__


@functools.cache
def binder_of(fn: Any, target: Any) -> tuple[Any, Any]:
    """Triton's backend, and what finds out about arguments, for a program."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(target)
    return backend, create_function_from_signature(fn.signature, fn.params, backend)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of its stack, where what does not fit registers is spilled to."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]) + int(found["LOCAL"])}


def accesses(ptx: str) -> dict[str, int]:
    """How many loads, stores and asynchronous copies of global memory of each width the program has."""
    counts: Counter[str] = Counter()
    for kind, rest in re.findall(r"\b(ld|st)\.global((?:\.[\w:]+)+)", ptx):
        parts = rest.split(".")
        counts[".".join([kind, *(p for p in parts if re.fullmatch(r"v\d|[bfus]\d+", p))])] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+)[,;]", ptx):
        counts[f"cp.async {int(size, 0)}"] += 1
    return dict(counts)


def ahead(ptx: str) -> int:
    """The most groups of asynchronous copies that a wait leaves under way; 0: nothing is read ahead."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)


def compiled(request: dict[str, Any]) -> list[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", request.get("target", 90), 32)
    found = []
    for made in record(request):
        key, source, options = specialise(made, target)
        entry: dict[str, Any] = {"name": made.kernel.fn.__name__, "key": key, "tag": request.get("tag")}
        entry |= {"launcher": made.launcher, "stages": options["num_stages"]}
        if request.get("compile", True):
            program = triton.compile(source, target=target, options=options)
            entry |= resources(program.asm["cubin"])
            ptx = program.asm["ptx"]
            entry |= {"shared": program.metadata.shared, "accesses": accesses(ptx), "ahead": ahead(ptx)}
            if request.get("ptx"):
                Path(request["ptx"]).write_text(ptx)
        found.append(entry)
    return found


if __name__ == "__main__":
    print(MARK + json.dumps([entry for request in json.load(sys.stdin) for entry in compiled(request)]))
