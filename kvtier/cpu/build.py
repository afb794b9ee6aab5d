"""Compile the native library: `python -m kvtier.cpu.build`. No network, no packages, only a C++17 compiler.

One library holds the kernel for every instruction set; which one runs is chosen at run time. The same function serves
this command, the wheel and editable installs (`setup.py` loads this file by path), so it imports nothing of kvtier.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "src"
LIBRARY = "libkvtier_cpu.so"

_COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # Keys must be read in rising order, as they are written: the hardware prefetches that best.
    "-fno-schedule-insns2",
    "-Wall",
    "-Wno-psabi",
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
_UNITS = {
    "engine.cpp": (),
    "isa_portable.cpp": ("-O2",),  # no faster with more, and four times as long to compile
}
_UNITS_X86 = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    # GCC 12 takes its own headers' undefined values for uninitialised ones.
    "isa_avx512.cpp": (*_AVX512, "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    "isa_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
}


class BuildError(RuntimeError):
    """The library could not be compiled; says why."""


def digest() -> str:
    """A digest of the source, compiled into the library, so that a library that is out of date is noticed."""
    found = hashlib.sha256(" ".join(_COMMON).encode())
    for file in sorted(SOURCE.iterdir()):
        if file.suffix in (".h", ".cpp"):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def compiler() -> list[str]:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++ that is there. Raises `BuildError`."""
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX")


def build(target: Path, *, extra: tuple[str, ...] = ()) -> Path:
    """Compile the library.

    Args:
        target: the file to write. It is written beside and renamed: who has the old one open keeps it.
        extra: more flags, for compiler and linker (sanitizers, for tests).

    Returns:
        `target`.

    Raises:
        BuildError: no compiler, no Linux, or an error of the compiler's.
    """
    if sys.platform != "linux":
        raise BuildError(f"the native kernel is for Linux, this is {sys.platform}")
    command = compiler()
    units = dict(_UNITS)
    if platform.machine() in ("x86_64", "AMD64"):
        units |= _UNITS_X86
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(unit: str) -> str:
            out = str(Path(folder) / (unit + ".o"))
            flags = [*_COMMON, *units[unit], f'-DKVTIER_SOURCE="{digest()}"', *extra]
            _run([*command, *flags, "-c", str(SOURCE / unit), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as threads:
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
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def main() -> int:
    """Compile into this source tree, unless that is done."""
    target = Path(__file__).resolve().parent / LIBRARY
    if target.exists() and digest().encode() in target.read_bytes():
        print(f"{target}: up to date")
        return 0
    try:
        build(target)
    except BuildError as error:
        print(f"kvtier: the native kernel was not compiled: {error}", file=sys.stderr)
        return 1
    print(f"{target}: compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
