"""Compile the native library: `python -m kvtier.cpu.build`. No network, no packages, only a C++17 compiler.

One library holds the kernel for every instruction set; which one runs is chosen at run time. The same functions serve
this command, wheels and editable installs (`setup.py` loads this file by path), so it imports nothing of kvtier.
"""

from __future__ import annotations

import _ctypes
import argparse
import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "src"
LIBRARY = "libkvtier_cpu.so"
#: Where `update` puts it, and where it is looked for.
TARGET = Path(__file__).resolve().with_name(LIBRARY)

_COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # Loads stay in the order in which they are written: without prefetches by hand, a Zen 4 core was faster by that.
    "-fno-schedule-insns2",
    "-Wall",
    "-Wno-psabi",
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
# In each, what takes longest comes first: with few cores the last one to begin decides when all is done.
_UNITS = {
    "isa_portable.cpp": ("-O2",),  # no faster with more, and four times as long to compile
    "engine.cpp": (),
}
_UNITS_X86 = {
    # GCC 12 takes its own headers' undefined values for uninitialised ones.
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "isa_amx_bf16.cpp": (*_AVX512, "-mavx512bf16", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "isa_avx512.cpp": (*_AVX512, "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
}
_UNITS_ARM: dict[str, tuple[str, ...]] = {"isa_neon.cpp": ()}


class BuildError(RuntimeError):
    """The library could not be compiled; says why."""


def digest() -> str:
    """A digest of sources, flags and architecture, compiled into the library: one that is out of date is noticed.

    Raises:
        BuildError: there are no sources, as in an installed package.
    """
    if not SOURCE.is_dir():
        raise BuildError("an installed package has no C++ sources: install kvtier again, from its source")
    found = hashlib.sha256(repr((_COMMON, _units())).encode())
    for file in sorted(SOURCE.iterdir()):
        if file.suffix in (".h", ".cpp"):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def _units() -> dict[str, tuple[str, ...]]:
    """Every unit with its flags."""
    machine = platform.machine()
    own = _UNITS_X86 if machine in ("x86_64", "AMD64") else _UNITS_ARM if machine in ("aarch64", "arm64") else {}
    return own | _UNITS


def is_current(library: Path) -> bool:
    """Whether this library can be loaded here, and is what `build` would make now."""
    try:
        found = load(library)
    except OSError:
        return False
    try:
        found.kvtier_source.restype = ctypes.c_char_p
        return bool(found.kvtier_source() == digest().encode())
    except AttributeError:
        return False
    finally:
        # Else this process would find the same one under this name, also where another one has taken its place.
        _ctypes.dlclose(found._handle)


def load(library: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: it is missing, cannot be loaded here, or lacks its end, which would end the process that loads it.
    """
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) == 64 and header.startswith(b"\x7fELF\x02"):  # 64 bits; its last bytes are the table of sections
        (start,), (size, count) = struct.unpack_from("=Q", header, 40), struct.unpack_from("=2H", header, 58)
        if library.stat().st_size < start + size * count:
            raise OSError("its end is missing")
    return ctypes.CDLL(str(library))


def compiler() -> list[str]:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++ that is there.

    Raises:
        BuildError: there is none, CXX is no command, or this is not Linux.
    """
    if sys.platform != "linux":
        raise BuildError(f"the native kernel is for Linux, this is {sys.platform}")
    chosen = os.environ.get("CXX", "")
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(f"CXX={chosen} is no command: {error}") from error
    if words:
        return words
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX")


def build(target: Path, *, extra: tuple[str, ...] = ()) -> Path:
    """Compile the library.

    Args:
        target: the file to write. It is written under another name and renamed: a process that has the old one open
            keeps it.
        extra: more flags, for compiler and linker (sanitizers, for tests).

    Returns:
        `target`.

    Raises:
        BuildError: no compiler, no Linux, no sources, no room for files, or an error of the compiler's.
    """
    try:
        return _built(target, extra)
    except OSError as error:
        raise BuildError(f"a file cannot be written or read: {error}") from error


def _built(target: Path, extra: tuple[str, ...]) -> Path:
    command = compiler()
    units = _units()
    source = f'-DKVTIER_SOURCE="{digest()}"'
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(unit: str) -> str:
            out = str(Path(folder) / (unit + ".o"))
            _run([*command, *_COMMON, *units[unit], source, *extra, "-c", str(SOURCE / unit), "-o", out])
            return out

        # Linux only, as above: the cores that this process may use.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            objects = list(threads.map(compiled, units))
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run([*command, "-shared", "-pthread", *extra, *objects, "-o", str(new)])
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)
    return target


def _run(command: list[str]) -> None:
    try:
        # A path that the compiler names may be no text in this encoding.
        done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def update() -> bool:
    """Compile into this source tree, unless that is done. Raises `BuildError`. Returns whether it compiled.

    One process compiles at a time: another one waits, and then finds it done.
    """
    if is_current(TARGET):
        return False
    compiler()  # not on Linux: no fcntl either
    import fcntl

    with contextlib.ExitStack() as stack:
        try:
            # The folder itself is the lock, so that no file is left over.
            folder = os.open(SOURCE, os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: two may compile, and the last one is kept
        if is_current(TARGET):
            return False
        build(TARGET)
        return True


def main(arguments: list[str]) -> int:
    """Compile into this source tree, unless that is done."""
    parser = argparse.ArgumentParser(
        description="Compile the native library into this source tree, unless that is done."
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing if it is")
    quiet = parser.parse_args(arguments).quiet
    try:
        if not is_current(TARGET):
            print(f"kvtier: compiling the native kernel, {TARGET.name} ...", flush=True)
            update()
        elif not quiet:
            print(f"kvtier: the native kernel, {TARGET.name}, is up to date")
    except BuildError as error:
        print(f"kvtier: the native kernel was not compiled: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
