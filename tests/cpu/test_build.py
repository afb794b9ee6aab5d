"""Compiling and finding the native library: what is missing or stale is said, never guessed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import pytest
import torch
from problems import instruction_sets

from kvtier.cpu import build, loader, native
from kvtier.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
REAL = build.TARGET


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., bool]]:
    """`native.available()` as in a new process, with these variables and this library."""
    before = native.instruction_set() if loader._load() is not None else None

    def fresh(forced: str | None = None, target: Path | None = None) -> bool:
        monkeypatch.setattr(loader, "_load", functools.cache(loader._load.__wrapped__))
        monkeypatch.setattr(build, "TARGET", target or tmp_path / "missing.so")
        if forced is None:
            monkeypatch.delenv(native.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(native.VARIABLE, forced)
        return native.available()

    yield fresh
    monkeypatch.undo()
    if before is not None:
        native.use_instruction_set(before)


def stub(folder: Path, source: str, function: str = "kvtier_source") -> Path:
    """A library of one function, which says that it was compiled from `source`."""
    try:
        compiler = build.compiler()
    except build.BuildError:
        pytest.skip("there is no C++ compiler here")
    code, made = folder / "stub.cpp", folder / "stub.so"
    code.write_text(f'extern "C" const char* {function}(void) {{ return "{source}"; }}\n')
    subprocess.run([*compiler, "-shared", "-fPIC", str(code), "-o", str(made)], check=True)
    return made


def test_a_missing_library_is_warned_about_once_and_not_used(load: Callable[..., bool]) -> None:
    with pytest.warns(RuntimeWarning, match=r"not compiled.*python -m kvtier.cpu.build") as caught:
        assert not load()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.available()
    assert loader.missing() == "it was not compiled. `python -m kvtier.cpu.build` compiles it."


def test_nothing_is_missing_where_it_was_not_asked_for(load: Callable[..., bool]) -> None:
    assert not load("none")
    assert loader.missing() == ""
    loader._load.cache_clear()
    assert loader.missing() == ""
    assert loader._load.cache_info().currsize == 0


def test_nothing_is_missing_where_it_is_used(kernel: None, load: Callable[..., bool]) -> None:
    assert load(target=REAL)
    assert loader.missing() == ""


@pytest.mark.parametrize("content", [b"", b"no library at all\n"])
def test_a_library_that_cannot_be_loaded_is_warned_about(
    load: Callable[..., bool], tmp_path: Path, content: bytes
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert not load(target=broken)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load("avx2", target=broken)


LOADING = """
import sys, warnings
from pathlib import Path
from kvtier.cpu import build, native
warnings.simplefilter("ignore")
build.TARGET = Path(sys.argv[1])
print(build.is_current(build.TARGET), native.available())
"""


def test_a_library_without_its_end_is_warned_about(kernel: None, load: Callable[..., bool], tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken.so", REAL.read_bytes()
    for size in (60, 4096, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:size])
        # Not in this process, which reading what is missing would end.
        done = forks.run(LOADING, str(broken), env={**os.environ, "PYTHONPATH": str(ROOT), native.VARIABLE: ""})
        assert (done.returncode, done.stdout) == (0, "False False\n"), (size, done.stderr)
    with pytest.warns(RuntimeWarning, match="cannot be loaded .its end is missing"):
        assert not load(target=broken)


def test_a_library_that_replaces_a_stale_one_is_found_by_the_process_that_compiled_it(
    kernel: None, load: Callable[..., bool], tmp_path: Path
) -> None:
    target, new = tmp_path / build.LIBRARY, tmp_path / "new.so"
    target.write_bytes(REAL.read_bytes().replace(build.digest().encode(), b"0123456789abcdef"))
    assert not build.is_current(target)
    shutil.copyfile(REAL, new)
    new.replace(target)
    assert build.is_current(target)
    assert load(target=target)


def test_a_library_from_other_sources_is_refused(load: Callable[..., bool], tmp_path: Path) -> None:
    other = stub(tmp_path, "0123456789abcdef")
    assert not build.is_current(other)
    with pytest.warns(RuntimeWarning, match="compiled from other sources"):
        assert not load(target=other)
    with pytest.raises(ConfigError, match="compiled from other sources"):
        load("portable", target=other)


def test_another_library_of_this_name_is_warned_about(
    load: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = stub(tmp_path, "kvtier", function="other_source")
    for sources in (build.SOURCE, tmp_path / "none"):  # in a tree, and installed
        monkeypatch.setattr(build, "SOURCE", sources)
        loader._found.cache_clear()
        with pytest.warns(RuntimeWarning, match=r"cannot be loaded .*kvtier_source"):
            assert not load(target=other)


def test_an_instruction_set_that_is_asked_for_and_missing_is_an_error(load: Callable[..., bool]) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"KVTIER_CPU=avx2 asks for.*not compiled"):
            load("avx2")


def test_none_asks_for_torch_without_a_warning(load: Callable[..., bool], kernel: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load("none")
        assert not load("none", target=REAL)


def test_a_forced_instruction_set_is_used_or_refused(load: Callable[..., bool], kernel: None) -> None:
    here = instruction_sets()
    for name in here:
        assert load(name, target=REAL)
        assert native.instruction_set() == name
    for name in ("sse9", "AVX2", " avx2"):
        with pytest.raises(ConfigError, match="there is no such name"):
            load(name, target=REAL)
    with pytest.raises(ConfigError, match=r"does not have it\..* set it to .*portable"):
        load("avx2" if "neon" in here else "neon", target=REAL)
    assert load(target=REAL)
    with pytest.raises(ConfigError, match="sse9"):
        native.use_instruction_set("sse9")


USED = "from kvtier.cpu import native; print(native.available() and native.instruction_set())"


def is_intel() -> bool:
    file = Path("/proc/cpuinfo")
    return file.exists() and "GenuineIntel" in file.read_text()


def test_a_process_obeys_the_variable_and_else_uses_the_best(kernel: None) -> None:
    best = [x for x in instruction_sets() if not (is_intel() and x == "avx512_bf16")][-1]
    for forced, said in (("portable", "portable\n"), ("", best + "\n")):
        environment = {**os.environ, native.VARIABLE: forced, "PYTHONPATH": str(ROOT)}
        done = forks.run(USED, env=environment)
        assert (done.stdout, done.returncode) == (said, 0), done.stderr


#: This process is refused what asks for tiles, as in a container: a filter of its calls of the system.
NO_TILES = """
import ctypes, struct
ARCH_PRCTL, ALLOW, REFUSE = 158, 0x7FFF0000, 0x00050001
lines = ((0x20, 0, 0, 0), (0x15, 0, 1, ARCH_PRCTL), (0x06, 0, 0, REFUSE), (0x06, 0, 0, ALLOW))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("H6xQ", len(lines), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


def test_where_tiles_are_refused_intel_multiplies_no_pairs(kernel: None) -> None:
    if not is_intel() or "avx512_bf16" not in instruction_sets():
        pytest.skip("no processor of Intel's with products of bf16 pairs")
    done = forks.run(NO_TILES + USED, env={**os.environ, native.VARIABLE: "", "PYTHONPATH": str(ROOT)})
    assert (done.stdout, done.returncode) == ("avx512\n", 0), done.stderr


def test_torch_finds_no_better_instruction_set_than_this_library(kernel: None) -> None:
    found, torchs = instruction_sets(), torch.backends.cpu.get_cpu_capability()
    assert torchs not in ("AVX512", "AVX2") or torchs.lower() in found


ENVIRONMENT = """
import os, sys, warnings
import torch
torch.zeros(8) + 1
tasks = lambda: len(os.listdir("/proc/self/task"))
before = tasks()
from kvtier.cpu import native
warnings.simplefilter("error")
try:
    for _ in range(2):
        native.check_environment()
except Exception as error:
    print(type(error).__module__, type(error).__name__, error)
    from kvtier.cpu import loader
    assert "KVTIER_CPU" in str(error)
else:
    print("fine")
assert tasks() == before
"""


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        (None, "fine"),
        ("", "fine"),
        ("none", "fine"),
        ("portable", "fine"),
        ("avx9", "kvtier.errors ConfigError KVTIER_CPU=avx9: there is no such name. "),
    ],
)
def test_a_process_learns_early_that_its_environment_cannot_be_honoured(
    kernel: None, forced: str | None, said: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if forced is None else {native.VARIABLE: forced})
    done = forks.run(ENVIRONMENT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(said), done.stderr
    assert done.stdout.count("\n") == 1, done.stderr


# Compiling


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / build.LIBRARY
    old.write_text("an older one")
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(build.BuildError, match="/nonexistent/c\\+\\+ cannot be run"):
        build.build(old)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: install"):
        build.build(old)
    assert [file.name for file in tmp_path.iterdir()] == [build.LIBRARY]
    assert old.read_text() == "an older one"


def compiler_that(folder: Path, does: str) -> str:
    script = folder / "c++"
    script.write_text(f"#!/bin/sh\necho \"$@\" >>'{folder}/calls'\n{does}\n")
    script.chmod(0o755)
    return str(script)


def test_an_error_of_the_compilers_is_told_and_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / build.LIBRARY
    old.write_text("an older one")
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "echo 'expected a semicolon' >&2; exit 1"))
    with pytest.raises(build.BuildError, match="expected a semicolon"):
        build.build(old)
    assert old.read_text() == "an older one"
    assert not list(tmp_path.glob(".*"))


def test_what_the_compiler_says_of_a_path_that_is_no_text_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "printf '/home/\\377.h: no such file' >&2; exit 1"))
    with pytest.raises(build.BuildError, match=r"/home/\\xff\.h: no such file"):
        build.build(tmp_path / build.LIBRARY)


def test_a_compiler_that_is_no_command_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(build.BuildError, match="CXX='g\\+\\+ is no command: No closing quotation"):
        build.build(tmp_path / build.LIBRARY)
    (tmp_path / "g++").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for none in ("", " "):
        monkeypatch.setenv("CXX", none)
        assert build.compiler() == ["g++"]


def test_without_room_for_files_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exit 1"))
    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(build.BuildError, match="cannot be written or read: No usable temporary directory"):
        build.build(tmp_path / build.LIBRARY)
    assert not (tmp_path / "calls").exists()


def test_only_the_unit_of_an_instruction_set_is_compiled_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What the compiler makes for another unit runs on every processor.
    makes = 'while [ "$1" != -o ]; do shift; done; echo made >"$2"'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, makes))
    assert build.build(tmp_path / "out" / "library.so", extra=("-DEXTRA",)).read_text() == "made\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    units = {found.group(1): call for call in calls if (found := re.search(r"-c \S*/(\w+\.cpp)", call))}
    assert set(units) == {file.name for file in build.SOURCE.glob("*.cpp") if build._units().keys() & {file.name}}
    assert {"engine.cpp", "isa_portable.cpp"} <= set(units)
    for unit, call in units.items():
        for flag in re.findall(r" -m(\S+)", call):
            allowed = {"isa_avx2.cpp": ("avx2", "fma", "f16c")}.get(unit)
            assert ("avx512" in unit or "amx" in unit) if allowed is None else flag in allowed, call
        assert "-march" not in call
        assert "-DEXTRA" in call


def test_compiling_what_is_compiled_is_no_work(kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build.is_current(REAL)
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exit 1"))
    assert not build.update()
    for quiet in ((), ("--quiet",)):
        done = subprocess.run([sys.executable, build.__file__, *quiet], capture_output=True, text=True)
        assert done.returncode == 0
        assert bool(done.stdout) is not bool(quiet)
    assert not (tmp_path / "calls").exists()


def test_every_source_counts_for_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(build.SOURCE, copy)
    right = build.digest()
    monkeypatch.setattr(build, "SOURCE", copy)
    assert build.digest() == right
    for file in sorted(copy.iterdir()):
        text = file.read_text()
        file.write_text(text + "\n")
        assert (build.digest() != right) == (file.suffix in (".h", ".cpp"))
        file.write_text(text)
    assert build.digest() == right
    monkeypatch.setattr(build, "_COMMON", (*build._COMMON, "-g"))
    assert build.digest() != right


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_what_runs_on_every_processor_has_no_instruction_of_a_better_one(kernel: None) -> None:
    # A template of the standard library compiled in two units is kept once, whichever the linker meets: were that the
    # one with AVX-512, the baseline would crash elsewhere.
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(REAL)], capture_output=True, text=True, check=True
    ).stdout
    if "zmm" not in text:
        pytest.skip("no library for x86-64")
    function, wrong = "", set()
    for line in text.splitlines():
        if line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]
        elif re.search(r"\t[vk]\w", line):  # how all of AVX and AVX-512 begins
            # Mangled: within the namespace of an instruction set, or the entry to it.
            home = re.search(
                r"(?:^|\D)(?:4(avx2)|6(avx512)|11(avx512_bf16)|8(amx_bf16))|^_Z\d+(?:avx|amx)\w+_kernelv", function
            )
            better = (
                {"avx2": r"zmm|%k\d", "avx512": "dpbf16|bf16ps"}.get(home.group(1) or home.group(2)) if home else "."
            )
            if better and re.search(better, line):
                wrong.add(function)
    assert not wrong


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_only_the_interface_is_exported(kernel: None) -> None:
    text = subprocess.run(["nm", "-D", "--defined-only", str(REAL)], capture_output=True, text=True, check=True).stdout
    header = (build.SOURCE / "attention.h").read_text()
    declared = set(re.findall(r"^KVTIER_API .*?(\w+)\(", header, re.MULTILINE))
    exported = {line.split()[-1] for line in text.splitlines()}
    assert len(declared) == 17
    assert declared <= exported
    assert not {name for name in exported - declared if not name.startswith(("_ZNS", "_ZSt", "_ZNKS", "_ZTI", "_ZTS"))}
