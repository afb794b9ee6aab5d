"""The native library: found, checked and loaded at first use."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import warnings
from pathlib import Path

from kvtier.cpu import build
from kvtier.errors import ConfigError, KVTierError

#: Forces an instruction set, or "none": the torch reference.
VARIABLE = "KVTIER_CPU"

#: All there are, for any machine.
INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "neon", "portable")

#: On which attention of many queries was timed against torch's kernel on dense tensors, and is as fast.
_FOR_PROMPTS = frozenset(("avx2", "avx512", "avx512_bf16", "amx_bf16"))

_ERRORS = {
    1: "shapes that do not fit each other",
    2: "no memory left",
    3: "it was submitted before this process was forked off",
}


def available() -> bool:
    """Whether the native library is there. Warns, once, if it is not. Raises `ConfigError` if it was asked for."""
    return _load() is not None


def check_environment() -> None:
    """Check that `KVTIER_CPU` can be honoured, before any work depends on it.

    Loads the library if the variable names an instruction set; starts no thread, and does nothing if it is not set.

    Raises:
        ConfigError: the library or the CPU lacks what the variable asks for.
    """
    if os.environ.get(VARIABLE):
        _load()


def missing() -> str:
    """Why this process does not use the native library, and what to do about it, in sentences; "" where it does, where
    nothing has asked for it yet, and where torch was asked for instead. Loads nothing."""
    tried, asked_for = _load.cache_info().currsize > 0, os.environ.get(VARIABLE) == "none"
    return _found(build.TARGET)[1] if tried and not asked_for and not available() else ""


def library() -> ctypes.CDLL:
    """The loaded library; only where `available()`. A call of its functions releases the GIL."""
    found = _load()
    assert found is not None
    return found


@functools.cache
def library_with_gil() -> ctypes.PyDLL:
    """The same, keeping the GIL: for calls that are shorter than giving it away."""
    return ctypes.PyDLL(library()._name)


def instruction_set() -> str:
    """The one in use."""
    return library().kvtier_instruction_set().decode()


def serves_prompts() -> bool:
    """Whether a library is there, and its instruction set is known to attend to many queries as fast as torch does."""
    return available() and instruction_set() in _FOR_PROMPTS


def use_instruction_set(name: str) -> None:
    """Use another one from now on. Raises `ConfigError` where this CPU lacks it."""
    if library().kvtier_use_instruction_set(name.encode()):
        raise ConfigError(f"This CPU, or this library, does not have {name!r}.")


def use_prefetch(way: str) -> None:
    """Choose who fetches keys and values into the CPU's caches: for tests and benchmarks.

    Args:
        way: "software": the kernel does; "hardware": the CPU alone; "learned": the faster one for a dtype and a
            number of query rows, found while tasks run, as it is from the start. All give the same bits.

    Raises:
        ConfigError: another name.
    """
    if library().kvtier_use_prefetch(way.encode()):
        raise ConfigError(f"There is no way to prefetch that is called {way!r}: software, hardware or learned.")


def check(error: int) -> None:
    """Raise `KVTierError` for an error code of the library."""
    if error:
        raise KVTierError(f"Attention on the host failed: {_ERRORS.get(error, f'error {error}')}.")


@functools.cache
def _load() -> ctypes.CDLL | None:
    forced = os.environ.get(VARIABLE, "")
    if forced == "none":
        return None
    library, why = _found(build.TARGET)
    if library is None:
        if forced:
            raise ConfigError(f"{VARIABLE}={forced} asks for the native kernel, but {why}")
        warnings.warn(
            f"kvtier's native kernel is not used: {why} Until then attention on the host runs on torch, several times "
            f"slower. {VARIABLE}=none asks for that, without a warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    pointer = ctypes.c_void_p
    library.kvtier_done.argtypes = [pointer]
    library.kvtier_use_team.argtypes = [pointer]
    library.kvtier_use_team.restype = library.kvtier_shutdown.restype = library.kvtier_drain.restype = None
    library.kvtier_instruction_set.restype = ctypes.c_char_p
    if forced and library.kvtier_use_instruction_set(forced.encode()):
        best = library.kvtier_instruction_set()
        here = [x for x in INSTRUCTION_SETS if library.kvtier_use_instruction_set(x.encode()) == 0]
        library.kvtier_use_instruction_set(best)
        why = "this CPU, or this library, does not have it" if forced in INSTRUCTION_SETS else "there is no such name"
        raise ConfigError(
            f"{VARIABLE}={forced}: {why}. Without it the best there is serves; otherwise set it to {', '.join(here)} "
            "or none (torch)."
        )
    library.kvtier_use_team(torch_team())
    # Before the interpreter frees what jobs in flight read: modules are cleared in an order that no one controls.
    atexit.register(library.kvtier_drain)
    return library


@functools.cache
def _found(target: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library in a file, or why it cannot be used, and what to do about it."""
    # An installed package has no sources that its library could be older than, nor could it be compiled there.
    in_tree = build.SOURCE.is_dir()
    if not target.exists():
        why = "it was not compiled"
    else:
        try:
            library = build.load(target)
            library.kvtier_source.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:  # the second: it is another library
            why = f"it cannot be loaded ({error})"
        else:
            if not in_tree or library.kvtier_source().decode() == build.digest():
                return library, ""
            why = "it was compiled from other sources"
    cure = "`python -m kvtier.cpu.build` compiles it." if in_tree else "Install a C++ compiler, then kvtier again."
    return None, f"{why}. {cure}"


def torch_team() -> int | None:
    """The address of the `GOMP_parallel` that torch's own parallel loops call; None where torch has no such runtime.

    A process may have several OpenMP runtimes: torch's, the system's, one that was preloaded. Each has a team of
    threads of its own, and two teams compete for the cores. So the symbol is looked up as the dynamic linker does it
    for torch: first in the global scope (a preloaded runtime is found there), then in what libtorch_cpu is linked with.
    """
    try:
        paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        path = next(path for path in paths if path.rsplit("/", 1)[-1].startswith("libtorch_cpu.so"))
        linked = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, StopIteration, AttributeError):
        return None
    with contextlib.suppress(AttributeError):
        linked = ctypes.CDLL(None).GOMP_parallel
    return ctypes.cast(linked, ctypes.c_void_p).value
