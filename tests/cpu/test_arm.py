"""The library for ARM, under an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.slow
def test_arm_gives_what_a_plain_loop_gives(tmp_path: Path) -> None:
    """Every instruction set that an ARM machine has, over problems of all kinds."""
    for tool in (COMPILER, EMULATOR):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    sources = [build.SOURCE / unit for unit in (*build._UNITS_ARM, *build._UNITS)]
    sources.append(Path(__file__).with_name("native_check.cpp"))
    program = str(tmp_path / "check")
    options = ["-std=c++17", "-O1", "-Wno-psabi", "-static", "-pthread", f"-I{build.SOURCE}"]
    subprocess.run([COMPILER, *options, *map(str, sources), "-o", program], check=True)
    for name in ("neon", "portable"):
        done = subprocess.run([EMULATOR, program, name, "12", "5"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{name}: 18 problems, 0 wrong" in done.stdout
