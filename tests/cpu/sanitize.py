"""Compile the native library and its check with sanitizers, and run it: `make sanitize`, several minutes.

python tests/cpu/sanitize.py [--problems N] [--seed S] [address] [thread]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtier.cpu import build  # noqa: E402

SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")


def run(name: str, problems: int, seed: int) -> bool:
    """Whether the check passes under this sanitizer with every instruction set that the CPU has."""
    # Vectors of memory are only checked where the compiler still sees them as memory: little optimisation.
    flags = (
        *SANITIZERS[name],
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
        # AMX by plain loops: few machines have it.
        "-DKVTIER_EMULATED_TILES",
        f"-I{Path(__file__).parent}",
    )
    with tempfile.TemporaryDirectory() as folder:
        library = build.build(Path(folder, build.LIBRARY), extra=flags)
        program = Path(folder, "native_check")
        source = Path(__file__).with_name("native_check.cpp")
        command = [*build.compiler(), "-std=c++17", "-Wall", *flags, f"-I{build.SOURCE}", str(source), str(library)]
        subprocess.run([*command, "-pthread", f"-Wl,-rpath,{folder}", "-o", str(program)], check=True)
        good = True
        for instruction_set in INSTRUCTION_SETS:
            print(f"{name}: ", end="", flush=True)
            done = subprocess.run(
                [str(program), instruction_set, str(problems), str(seed)],
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"},
            )
            good = good and done.returncode == 0
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", nargs="*", metavar="address|thread", default=list(SANITIZERS))
    parser.add_argument("--problems", type=int, default=60, help="of attention; half as many of the rest (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem (0)")
    arguments = parser.parse_args()
    if arguments.problems < 1:
        parser.error("--problems: at least 1")
    if unknown := set(arguments.sanitizers) - set(SANITIZERS):
        parser.error(f"no such sanitizer: {', '.join(sorted(unknown))}")
    return 0 if all([run(name, arguments.problems, arguments.seed) for name in arguments.sanitizers]) else 1


if __name__ == "__main__":
    sys.exit(main())
