"""Launching: whether Triton runs at all, compiled programs, how many programs share a context, alignments."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels.tables import Layout

#: Chooses what runs: "triton" (also in Triton's interpreter, on a CPU), "torch" (the reference); unset: what there is.
VARIABLE = "KVTIER_KERNELS"

#: Programs per multiprocessor that a low-query call is split into, about, where calibration stored no other number.
PROGRAMS = 4
#: Parts of a context at most, and tokens of one at least.
MOST_PARTS, _LEAST_TOKENS = 128, 256

#: The values of TRITON_INTERPRET that Triton takes for yes.
_YES = ("1", "true", "on", "yes", "y")


def available(device: torch.device) -> bool:
    """Whether the Triton programs run on `device`: CUDA of capability 8.0, or a CPU with Triton's interpreter.

    The interpreter (`TRITON_INTERPRET=1`) is slow and serves tests: it is used where KVTIER_KERNELS is "triton" only,
    and never on CUDA, whose memory it cannot read.

    Raises:
        ConfigError: KVTIER_KERNELS is none of "triton" and "torch", or is "triton" where Triton is not installed, or
            interprets for CUDA.
        UnsupportedError: a CUDA graph is being captured, and nothing was tried before.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _YES
    # Asked several times for each layer and step: answered once.
    return _available(device, os.environ.get(VARIABLE, ""), interpreted, _installed())


@functools.cache
def _available(device: torch.device, setting: str, interpreted: bool, installed: bool) -> bool:
    if setting not in ("", "triton", "torch"):
        raise ConfigError(f"{VARIABLE}={setting!r}: it is 'triton' or 'torch', or not set.")
    if setting == "torch":
        return False
    if not installed:
        if setting:
            raise ConfigError(f"{VARIABLE}=triton, but Triton is not installed: pip install 'kvtier[cuda]'.")
        return False
    if device.type != "cuda":
        return device.type == "cpu" and bool(setting) and interpreted
    if interpreted:
        reason = "TRITON_INTERPRET is set: interpreted programs cannot read a CUDA device's memory."
        if setting:
            raise ConfigError(reason)
        _warn_of_torch(device, reason)
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if setting:
        return True
    if capturing(device):  # an error is not kept: the next call asks again
        raise UnsupportedError(
            "Whether Triton's programs run here is found out by a trial, which the CUDA graph being captured cannot "
            f"hold: make one step before the capture, or set {VARIABLE}=triton."
        )
    return _runs(device)


def _warn_of_torch(device: torch.device, reason: str) -> None:
    warnings.warn(
        f"kvtier's Triton kernels are not used: {reason} Attention on {device} runs on torch, slower. "
        f"{VARIABLE}=torch asks for that, without a warning.",
        RuntimeWarning,
        stacklevel=4,
    )


def _runs(device: torch.device) -> bool:
    """Whether a small program can be compiled and launched; says why not, once."""
    try:
        from kvtier.kernels import copy_programs

        source, target = torch.zeros((2, 4), dtype=torch.int32, device=device)
        at = [torch.tensor([x.data_ptr()], device=device) for x in (source, target)]
        with on(device):
            copy_programs.copy[(1,)](*at, 1, 1, 1, 1, WORDS=4096, num_warps=4)
    except Exception as error:  # whatever Triton, its compiler or its driver raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _warn_of_torch(device, f"a trial failed ({reason[0]}). Triton needs a C compiler, such as gcc.")
        return False
    return True


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def machine(device: torch.device) -> str:
    """The device and the versions that a value measured on `device` depends on, for `kvtier.profile`."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, {processor()}"
    else:
        name = f"{device.type}, {processor()}"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    # A plain source tree has no metadata, and what imports this has imported the package.
    return f"{name}; kvtier {sys.modules['kvtier'].__version__}, torch {torch.__version__}, triton {triton}"


#: What tells generations of processors apart: as it is called here, and in /proc/cpuinfo.
_GENERATION = {
    **{"family": "cpu family", "model": "model", "stepping": "stepping"},
    **{"implementer": "CPU implementer", "part": "CPU part"},
}


def processor() -> str:
    """What launches and copies are issued by: their cost is part of what is measured.

    A virtual machine often says no more than "AMD EPYC", and those of ARM name none. So the numbers of its generation
    are named too: Skylake and Cascade Lake differ in the stepping alone.
    """
    said: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if not name.strip():  # the next of the processors
                break
            said[name.strip()] = value.strip()
    names = [said.get("model name") or platform.machine()]
    names += [f"{name} {said[key]}" for name, key in _GENERATION.items() if key in said]
    return f"{' '.join(names)}, {os.cpu_count()} CPUs"


def numbered(device: torch.device) -> torch.device:
    """The same device with its index: "cuda" alone is the current one, but equal to none and no key for it."""
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_index(device: torch.device) -> int | None:
    """The number of a CUDA device; None of others."""
    return device.index if device.type == "cuda" else None


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make `device` that."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def stream_number(device: torch.device) -> int | None:
    """Tells the current stream of a device from others, in less time than torch takes to make an object of it; None:
    torch was built without CUDA."""
    return None if _stream_number is None or device.index is None else _stream_number(device.index)


_stream_number: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def captured(x: torch.Tensor) -> bool:
    """Whether what is done with a tensor now goes into a CUDA graph. Costs next to nothing on a CPU."""
    return not x.is_cpu and capturing(x.device)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured there: launches will be replayed, and nothing may be waited for."""
    if device.type != "cuda":
        return False
    with on(device):
        return torch.cuda.is_current_stream_capturing()


class Launcher:
    """A Triton program with its constants. After the first launch, without what Triton does for each.

    Triton finds the compiled program of a launch by looking at all arguments, which takes longer than everything else.
    The owner of a launcher guarantees that all of its launches are of one variant: same device, same dtypes, the same
    arguments None; only addresses and other numbers differ.
    """

    __slots__ = ("_constants", "_launch", "_options", "_program")

    def __init__(self, program: Any, constants: dict[str, Any], **options: int) -> None:
        self._program = program
        self._constants = constants
        # Otherwise a later Triton would round products before it adds them, where now it rounds once.
        self._options = {"enable_fp_fusion": True} | options
        self._launch: Callable[..., None] | None = None

    @property
    def ready(self) -> bool:
        """Whether tensors may be given as addresses. The first launch, and Triton's interpreter, need the tensors."""
        return self._launch is not None

    def __call__(self, count: int, *args: Any) -> None:
        """Launch `count` programs on the current stream of the current device."""
        if self._launch is not None:
            self._launch(count, *args)
            return
        compiled = self._first(count, args)
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns nothing
            from kvtier.kernels import programs

            constants = (self._constants[x] for x in self._program.arg_names if x in self._constants)
            self._launch = programs.relauncher(compiled, tuple(constants))

    def _first(self, count: int, args: tuple[Any, ...]) -> Any:
        """A launch by Triton itself; with fewer stages where the device has no shared memory for all of them.

        How much they take depends on the device, and on what is asked for: a mask has its tiles, too. Stages are read
        ahead, and change no order of sums.
        """
        from kvtier.kernels import programs

        while True:
            try:
                return self._program[(count,)](*args, **self._constants, **self._options)
            except programs.OutOfResources:
                stages = self._options.get("num_stages", 1)
                if stages <= 1:
                    raise
                self._options["num_stages"] = max(1, stages - 2)


# Shapes


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def alignment(x: torch.Tensor) -> int:
    """Bytes, at most 16, that every row of `x` along its last dimension begins at a multiple of."""
    strides = 0
    for stride in x.stride()[:-1]:
        strides |= stride
    return factor(x.data_ptr() | strides * x.element_size())


def block_alignment(layout: Layout) -> dict[str, int]:
    """K_ALIGN and V_ALIGN: what the address of every key and value is a multiple of, if blocks begin at ones of 16."""
    size = layout.dtype.itemsize
    return {"K_ALIGN": factor(layout.k_dim * size), "V_ALIGN": factor((layout.v_dim | layout.k_numel) * size)}


def factor(n: int) -> int:
    """The greatest power of two, at most 16, that `n` is a multiple of: of bytes, an alignment."""
    return (n | 16) & -(n | 16)


def parts_of(busy: int, tokens: int, device: torch.device, programs: int = PROGRAMS) -> int:
    """Parts of a context for a call of `busy` programs over at most so many tokens; a power of two.

    Args:
        programs: for each multiprocessor, about.
    """
    parts = min(MOST_PARTS, programs * _processors(device) // busy, tokens // _LEAST_TOKENS)
    return 1 << max(parts, 1).bit_length() - 1


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
