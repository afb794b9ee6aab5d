"""A driver of Triton that runs nothing, so that the cost of launching can be counted without a GPU.

Programs are compiled for a CUDA device that need not be there; tensors are on the CPU, and are not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kvtier.kernels import copies, launch, paged


class Nothing:
    """Triton's launcher of a compiled program: it launches nothing."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        """Triton calls this for each launch."""


class Driver:
    """Triton's driver, of a device of a CUDA capability and with so much shared memory for a program."""

    launcher_cls: type = Nothing

    def __init__(self, capability: int = 90, shared: int = 227 * 1024) -> None:
        self.loaded = 0
        self.capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared}, load_binary=self.load
        )

    def load(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and threads of a program."""
        self.loaded += 1
        return 0, self.loaded, 32, 0, 1024

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> Any:
        """What programs are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextlib.contextmanager
def installed(driver: Driver, processors: int = 132) -> Iterator[None]:
    """Let kvtier's kernels launch through a driver, with CPU tensors, as on a device of so many multiprocessors."""
    from triton.runtime.driver import driver as active

    replaced = [(paged, "available"), (copies, "available"), (launch, "_processors")]
    before = [getattr(module, name) for module, name in replaced]
    active_before = active._active
    active.set_active(driver)  # type: ignore[arg-type]
    paged.available = copies.available = lambda device: True
    launch._processors = lambda device: processors  # type: ignore[assignment]
    try:
        yield
    finally:
        for (module, name), value in zip(replaced, before, strict=True):
            setattr(module, name, value)
        active._active = active_before
