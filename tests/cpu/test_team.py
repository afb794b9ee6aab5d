"""Whatever OpenMP runtimes a process has, the kernel shares the threads of the one that torch uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtier.cpu import build, native

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("kernel")

PROGRAM = """
import ctypes, os, sys
root, here, when, other = sys.argv[1:]
sys.path[:0] = [root, here]

def tasks():
    return len(os.listdir("/proc/self/task"))

if when == "before":
    ctypes.CDLL(other)
elif when == "before, global":
    ctypes.CDLL(other, mode=ctypes.RTLD_GLOBAL)
import torch
from kvtier.cpu import native
from test_threads import SPEC, Call
if when == "after":
    ctypes.CDLL(other)
elif when == "after, global":
    ctypes.CDLL(other, mode=ctypes.RTLD_GLOBAL)
mapped = open("/proc/self/maps").read()
assert other in mapped, "it was loaded"
torch.set_num_threads(3)
torch.ones(1000, 1000).exp_()  # the team of torch's runtime exists
before = tasks()
call = Call(SPEC)
result = call.attend(3)  # once: a team that returns late is left alone for some calls
assert call.is_right(result.out, result.lse)
print("threads:", tasks() - before)
"""


def runtime() -> Path:
    """The file of the GNU OpenMP runtime that torch is linked with."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp"):
            return path
    pytest.skip("torch does not use GNU OpenMP here")


def started(when: str, other: Path, **variables: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(Path(__file__).parent), when, str(other)]
    environment = {**os.environ, "OMP_NUM_THREADS": "3", **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("when", ["before", "after", "before, global", "after, global"])
def test_a_second_openmp_runtime_is_not_used(when: str, tmp_path: Path) -> None:
    # A copy under another name, as wheels bring their own: torch's libgomp and this one are both in the process. Where
    # it is loaded into the global scope before torch, torch itself uses it.
    own = runtime()
    content = own.read_bytes()
    soname = b"libgomp.so.1\0"
    if content.count(soname) != 1:
        pytest.skip("this runtime has another name")
    other = tmp_path / "libgomp-0123abcd.so"
    other.write_bytes(content.replace(soname, b"libgomp.so.9\0"))
    assert started(when, other) == "threads: 0\n"


PRELOADED = r"""
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <stdio.h>

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

/* As when a vendor's runtime is preloaded: torch's own parallel loops reach it, by the same name. */
extern "C" void GOMP_parallel(void (*f)(void*), void* data, unsigned threads, unsigned flags) {
  static Parallel next = (Parallel)dlsym(RTLD_NEXT, "GOMP_parallel");
  fputs("preloaded\n", stderr);
  next(f, data, threads, flags);
}
"""


def test_a_preloaded_runtime_is_used_as_torch_uses_it(tmp_path: Path) -> None:
    runtime()
    try:
        command = build.compiler()
    except build.BuildError:
        pytest.skip("there is no C++ compiler here")
    code, made = tmp_path / "preloaded.cpp", tmp_path / "libpreloaded.so"
    code.write_text(PRELOADED)
    subprocess.run([*command, "-shared", "-fPIC", str(code), "-o", str(made), "-ldl"], check=True)
    program = """
import ctypes, sys
sys.path[:0] = sys.argv[1:]
import torch
from kvtier.cpu import native
own = ctypes.CDLL(sys.argv[3]).GOMP_parallel
assert native.torch_team() == ctypes.cast(own, ctypes.c_void_p).value
print("torch:", file=sys.stderr)
torch.ones(1000, 1000).exp_()
print("fine")
"""
    command = [sys.executable, "-c", program, str(ROOT), str(Path(__file__).parent), str(made)]
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "LD_PRELOAD": str(made)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "fine\n", done.stderr
    assert "preloaded" in done.stderr.split("torch:")[1], "torch calls it"


def test_the_team_is_found_where_torch_has_one() -> None:
    assert (native.torch_team() is not None) == ("GNU OpenMP" in torch.__config__.show() or bool(runtime()))
