"""What the driver is handed for each launch, without a GPU: run as a script, it attends a few times and reports.

A process of its own, as `compiled`: Triton compiles, and a driver that only takes notes stands in for CUDA's. The
answer is a JSON list of calls, each a list of launches `{"name", "grid", "stream", "function", "packed", "args",
"by_triton", "hooks", "stages", "shared", "fused"}`; tensors are addresses, `by_triton` says that Triton's own launch
was asked, not the compiled program, and `hooks` that the driver was handed a profiler's. `launched.py small` makes
calls that take much shared memory, each twice, on a device that has little.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.stub import Driver, installed
from kvtier.kernels import paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

launches: list[dict[str, Any]] = []
asked: list[int] = []


class Notes:
    """Triton's launcher of a compiled program."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name
        self.compiled = {
            "stages": metadata.num_stages,
            "shared": metadata.shared,
            "fused": metadata.enable_fp_fusion,
        }

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, *rest: Any
    ) -> None:
        enter, leave, *args = rest
        found = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        with_hooks = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
        launches.append(
            {"name": self.name, "grid": [x, y, z], "stream": stream, "function": function, "packed": packed}
            | {"args": found, "by_triton": bool(asked), "hooks": with_hooks}
            | self.compiled
        )


class Notebook(Driver):
    """A driver that runs nothing, and takes notes."""

    launcher_cls = Notes


#: The least shared memory that a program may take on a device of capability 8.0 or newer, which 8.6, 8.9, 12.0 have.
SMALL = 99 * 1024


def main(small: bool) -> None:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        try:
            return run(self, *args, **kwargs)
        finally:
            asked.pop()

    JITFunction.run = noted
    with installed(Notebook(86, SMALL) if small else Notebook()):
        print(json.dumps(wide() if small else decode()))


def decode() -> list[list[dict[str, Any]]]:
    """One query over contexts of several lengths, by several numbers of programs; then as prepared, and with a hook."""
    import triton

    layout = BlockLayout(2, 2, 64, 64, 64, torch.bfloat16)
    table = AddressTable(torch.zeros((1, 64), dtype=torch.int64), positions=torch.zeros((1, 64), dtype=torch.int32))
    query = torch.zeros((1, 8, 1, 64), dtype=torch.bfloat16)
    out, lse = torch.zeros((1, 8, 1, 64)), torch.zeros((1, 8, 1))
    calls = []
    for length, parts in ((4000, 1), (4000, 1), (4080, 1), (4000, 4), (4000, 4), (4000, 8)):
        paged.attend(query, table, layout, length, AttentionParams(0.5), out=out, lse=lse, parts=parts)
        calls.append(launches.copy())
        launches.clear()
    prepared = paged.Prepared(layout)
    for hooked in (False, False, True):
        if hooked:
            triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
        prepared(query, table, 4000, AttentionParams(0.5))
        calls.append(launches.copy())
        launches.clear()
    return calls


def wide() -> list[list[dict[str, Any]]]:
    """Many queries of wide heads, in fp32, and with all that is asked for at once, each call twice."""
    calls = []
    for k_dim, v_dim, dtype, queries, more in (
        (256, 256, torch.bfloat16, 64, False),
        (576, 512, torch.bfloat16, 32, False),
        (576, 512, torch.float32, 32, False),
        (128, 128, torch.float16, 128, True),
    ):
        layout = BlockLayout(1, 1, k_dim, v_dim, 16, dtype)
        table = AddressTable(torch.zeros((1, 8), dtype=torch.int64), positions=torch.zeros((1, 8), dtype=torch.int32))
        params = AttentionParams(0.5, causal=True)
        if more:
            mask, one = torch.zeros((1, 1, queries, 128)), torch.zeros(1)
            params = AttentionParams(0.5, 2.0, 99, True, mask, torch.zeros(1, dtype=torch.int64), one, one)
        query = torch.zeros((1, 1, queries, k_dim), dtype=dtype)
        for _ in range(2):
            paged.attend(query, table, layout, 128, params, parts=1)
            calls.append(launches.copy())
            launches.clear()
    return calls


if __name__ == "__main__":
    main(sys.argv[1:] == ["small"])
