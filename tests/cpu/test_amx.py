"""Products by AMX tiles: the same source, with the tile instructions as plain loops where no machine has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from problems import Case, Spec, attend, instruction_sets

from kvtier.cpu import build, native

HERE = Path(__file__).parent
#: What else the engine would choose from.
OTHERS = """
#include "tasks.h"
const Kernel* portable_kernel() { return nullptr; }
const Kernel* avx2_kernel() { return nullptr; }
const Kernel* avx512_kernel() { return nullptr; }
const Kernel* avx512_bf16_kernel() { return nullptr; }
"""


@pytest.mark.slow
def test_tiles_give_what_a_plain_loop_gives(tmp_path: Path) -> None:
    """Problems of all kinds, and the emulation faults where an instruction would: no configuration, or a wrong one."""
    unit = "isa_amx_bf16.cpp"
    if unit not in build._units():
        pytest.skip("tiles are x86-64's")
    (tmp_path / "others.cpp").write_text(OTHERS)
    options = ["-std=c++17", "-O1", "-w", "-DKVTIER_EMULATED_TILES", f"-I{build.SOURCE}", f"-I{HERE}"]
    objects = []
    for source in (
        build.SOURCE / unit,
        build.SOURCE / "engine.cpp",
        tmp_path / "others.cpp",
        HERE / "native_check.cpp",
    ):
        objects.append(str(tmp_path / (source.name + ".o")))
        flags = build._units()[unit] if source.name == unit else ()
        subprocess.run([*build.compiler(), *options, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    program = str(tmp_path / "check")
    subprocess.run([*build.compiler(), *objects, "-pthread", "-o", program], check=True)
    done = subprocess.run([program, "amx_bf16", "40", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if "does not have it" in done.stdout + done.stderr:
        pytest.skip("this CPU has no AVX-512 with bf16, which comes with tiles")


@pytest.mark.parametrize(("group", "queries"), [(1, 1), (3, 2), (4, 1), (6, 1), (7, 1), (4, 4)])
def test_few_rows_are_multiplied_in_fp32_as_without_tiles(group: int, queries: int) -> None:
    """Pairs take this processor twice as long; tiles multiply them faster from 7 rows on."""
    if "amx_bf16" not in instruction_sets():
        pytest.skip("no tiles here")
    before, found = native.instruction_set(), []
    case = Case(Spec(torch.bfloat16, 2, group, queries, 128, 80, block_size=64, lengths=(300, 65), causal=True))
    try:
        for name in ("avx512", "amx_bf16"):
            native.use_instruction_set(name)
            found.append(attend(case))
    finally:
        native.use_instruction_set(before)
    assert torch.equal(found[0].out, found[1].out) == (group * queries < 7)
