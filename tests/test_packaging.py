"""Packages: a wheel carries the native library and fits every Python; without a compiler it is pure Python.

They are built the way pip does it, by calling the build backend, but in this environment, so that nothing is loaded
from a network. The kernel is a stand-in of three lines: what is tested is how it gets where it belongs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="packages are built with setuptools, which is not here")

from kvtier.cpu import build

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = f"kvtier/cpu/{build.LIBRARY}"
SAYS_SO = "kvtier: the native kernel was not compiled"
NO_COMPILER = {"CXX": "/nonexistent/c++"}


def _has_compiler() -> bool:
    try:
        build.compiler()
    except build.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler here")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with nothing compiled."""
    made = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", ".*.so.*")
    shutil.copytree(ROOT / "kvtier", made / "kvtier", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, made)
    for unit in (made / "kvtier" / "cpu" / "src").glob("*.cpp"):
        unit.write_text("// nothing\n")
    (made / "kvtier" / "cpu" / "src" / "engine.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) const char* kvtier_source() { return KVTIER_SOURCE; }\n'
    )
    return made


def run(tree: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("KVTIER_REQUIRE_NATIVE", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=kept | environment, capture_output=True, text=True, timeout=120
    )


def package(tree: Path, kind: str, **environment: str) -> tuple[Path, str]:
    """Have the backend build a `wheel`, an `editable` or an `sdist`. Returns it, and what was printed."""
    out = tree.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    done = run(tree, "-c", f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})", **environment)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    (made,) = out.iterdir()
    return made, printed


def is_native(wheel: Path) -> bool:
    """Whether a wheel holds the library; its name and metadata must say the same."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
    native = LIBRARY in names
    tag = r"py3-none-linux_\w+" if native else r"py3-none-any"
    assert re.search(rf"-{tag}\.whl$", wheel.name)
    assert re.search(rf"^Tag: {tag}$", about, re.MULTILINE)
    assert f"Root-Is-Purelib: {str(not native).lower()}" in about
    assert "kvtier/py.typed" in names
    # A folder without an __init__.py works in a checkout, and would be missing in what is installed.
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvtier").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    # Native.py takes a folder of sources for a tree in which the library can be compiled.
    assert not [name for name in names if "/src" in name or "tests" in name]
    return native


@needs_compiler
def test_a_wheel_carries_the_library_and_fits_every_python(tree: Path) -> None:
    wheel, _ = package(tree, "wheel", KVTIER_REQUIRE_NATIVE="1")
    assert is_native(wheel)
    # A Python that runs in the tree imports the tree, whatever is installed.
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(LIBRARY) == (tree / LIBRARY).read_bytes()


@needs_compiler
def test_an_up_to_date_library_is_packaged_as_it_is(tree: Path) -> None:
    assert run(tree, "kvtier/cpu/build.py").returncode == 0
    wheel, _ = package(tree, "wheel", **NO_COMPILER)
    assert is_native(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(LIBRARY) == (tree / LIBRARY).read_bytes()

    with (tree / "kvtier" / "cpu" / "src" / "engine.cpp").open("a") as source:
        source.write("// changed\n")
    wheel, printed = package(tree, "wheel", **NO_COMPILER)
    assert SAYS_SO in printed
    assert not is_native(wheel), "neither an old library of the tree nor that of the last build"


def test_without_a_compiler_a_wheel_is_pure_and_says_so(tree: Path) -> None:
    wheel, printed = package(tree, "wheel", **NO_COMPILER)
    assert not is_native(wheel)
    assert printed.count(SAYS_SO) == 1
    assert "/nonexistent/c++ cannot be run" in printed


def test_a_source_that_does_not_compile_gives_a_pure_wheel(tree: Path) -> None:
    (tree / "kvtier" / "cpu" / "src" / "engine.cpp").write_text("#error no\n")
    wheel, printed = package(tree, "wheel")
    assert not is_native(wheel)
    assert printed.count(SAYS_SO) == 1


def test_the_library_can_be_required(tree: Path) -> None:
    for kind in ("wheel", "editable"):
        command = f"import setuptools.build_meta as b; b.build_{kind}('out')"
        done = run(tree, "-c", command, KVTIER_REQUIRE_NATIVE="1", **NO_COMPILER)
        assert done.returncode != 0
        assert SAYS_SO in done.stdout + done.stderr


@needs_compiler
def test_a_source_distribution_has_what_a_wheel_is_compiled_from(tree: Path) -> None:
    sdist, _ = package(tree, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree.parent / "unpacked", filter="data")
    (unpacked,) = (tree.parent / "unpacked").iterdir()
    assert not (unpacked / LIBRARY).exists()
    wheel, _ = package(unpacked, "wheel", KVTIER_REQUIRE_NATIVE="1")
    assert is_native(wheel)


@needs_compiler
def test_an_editable_install_compiles_in_place(tree: Path) -> None:
    package(tree, "editable")
    assert (tree / LIBRARY).exists()
    assert "up to date" in run(tree, "kvtier/cpu/build.py", **NO_COMPILER).stdout
    assert run(tree, "kvtier/cpu/build.py", "--quiet").stdout == ""


@needs_compiler
def test_processes_that_build_at_once_compile_once(tree: Path) -> None:
    log = tree / "log"
    wrapper = tree / "c++"
    wrapper.write_text(f'#!/bin/sh\necho >>{log}\nexec {" ".join(build.compiler())} "$@"\n')
    wrapper.chmod(0o755)
    command = [sys.executable, "kvtier/cpu/build.py"]
    environment = os.environ | {"CXX": str(wrapper)}
    running = [subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    units = len(list((tree / "kvtier" / "cpu" / "src").glob("*.cpp")))
    assert len(log.read_text()) <= units + 1
    assert [p.name for p in (tree / "kvtier" / "cpu").glob("*.so*")] == [build.LIBRARY]


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--quite", 2)])
def test_a_question_and_a_wrong_option_compile_nothing(tree: Path, option: str, code: int) -> None:
    asked = run(tree, "kvtier/cpu/build.py", option)
    assert asked.returncode == code
    assert "--quiet" in asked.stdout + asked.stderr
    assert not (tree / LIBRARY).exists()


def test_an_installed_package_says_that_it_cannot_compile(tree: Path) -> None:
    shutil.rmtree(tree / "kvtier" / "cpu" / "src")
    done = run(tree, "-m", "kvtier.cpu.build")
    assert done.returncode == 1
    assert "no C++ sources" in done.stderr
    assert "Traceback" not in done.stderr
