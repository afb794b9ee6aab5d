"""What the driver is handed for each launch, without a GPU: run as a script, it attends a few times and reports.

A process of its own, as `compiled`: Triton compiles, and a driver that only takes notes stands in for CUDA's. The
answer is a JSON list of calls, each a list of launches `{"name", "grid", "function", "args", "by_triton"}`; tensors are
addresses, and `by_triton` says that Triton's own launch was asked, not the compiled program.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from kvtier.kernels import launch, paged
from kvtier.kernels.tables import AddressTable
from kvtier.kernels.terms import Terms
from kvtier.storage.block import BlockLayout

launches: list[dict[str, Any]] = []
asked: list[int] = []


class Notes:
    """Triton's launcher of a compiled program."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, *rest: Any
    ) -> None:
        _enter, _leave, *args = rest
        found = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        launches.append(
            {"name": self.name, "grid": [x, y, z], "function": function, "args": found, "by_triton": bool(asked)}
        )


class Driver:
    """Triton's driver, of a device of capability 9.0 that nothing runs on."""

    launcher_cls = Notes

    def __init__(self) -> None:
        self.loaded = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17}, load_binary=self.load
        )

    def load(self, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return 0, self.loaded, 32, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def main() -> None:
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        try:
            return run(self, *args, **kwargs)
        finally:
            asked.pop()

    JITFunction.run = noted
    driver.set_active(Driver())
    paged.available = lambda device: True
    launch._processors = lambda device: 132
    layout = BlockLayout(2, 2, 64, 64, 64, torch.bfloat16)
    table = AddressTable(torch.zeros((1, 64), dtype=torch.int64), positions=torch.zeros((1, 64), dtype=torch.int32))
    query = torch.zeros((1, 8, 1, 64), dtype=torch.bfloat16)
    out, lse = torch.zeros((1, 8, 1, 64)), torch.zeros((1, 8, 1))
    calls = []
    for length, parts in ((4000, 1), (4000, 1), (4080, 1), (4000, 4), (4000, 4), (4000, 8)):
        paged.attend(query, table, layout, length, Terms(0.5), out=out, lse=lse, parts=parts)
        calls.append(launches.copy())
        launches.clear()
    print(json.dumps(calls))


if __name__ == "__main__":
    main()
