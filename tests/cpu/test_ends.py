"""The kernel reads no byte behind a block: there may be no memory.

`Paged` has NaN there, which shows where it is used; `Fenced` has nothing, which shows where it is read at all.
"""

from __future__ import annotations

import ctypes
import itertools
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import forks
import torch
from problems import DTYPES, Case, Fenced, Spec, attend, changed

from kvtier.cpu import native

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: Elements of keys and values. Where a value has one element, the values of a short block do not hide a read behind its
#: keys.
SIZES = ((1, 1), (17, 1), (33, 1), (80, 1), (96, 1), (17, 17), (33, 33), (64, 64), (80, 80), (96, 96), (128, 128))


def specs() -> Iterator[Spec]:
    """Full blocks, which end with a whole vector, step or pair of tokens, and with any number of tokens behind it."""
    shapes = ((1, 1, 3), (2, 3, 2), (3, 7, 1), (4, 5, 2), (4, 18, 1), (5, 17, 3), (8, 33, 2))  # rows, tokens, blocks
    whole = ((1, 16, 2), (2, 8, 1), (4, 4, 3))
    for k_dim, v_dim in SIZES:
        for rows, size, blocks in shapes + whole:
            yield Spec(kv_heads=1, group=rows, k_dim=k_dim, v_dim=v_dim, block_size=size, lengths=(size * blocks,))
        # Packed.
        for size, blocks in ((1, 3), (7, 40), (19, 1)):
            lengths = (size * blocks,)
            yield Spec(kv_heads=2, group=80, queries=2, k_dim=k_dim, v_dim=v_dim, block_size=size, lengths=lengths)


def read_all(instruction_set: str) -> None:
    """Attend to all of them. Says which one is next: the process may not live to say more."""
    native.use_instruction_set(instruction_set)
    for dtype in DTYPES:
        for spec in itertools.islice(specs(), 0, None, 3 if instruction_set == "portable" else 1):
            case = Case(changed(spec, dtype=dtype))
            print(case.spec, flush=True)
            plain, paged = attend(case), Fenced(case)
            for way in ("software", "hardware"):
                native.use_prefetch(way)
                fenced = attend(case, paged=paged)
                assert torch.equal(fenced.out, plain.out)
                assert torch.equal(fenced.lse, plain.lse)
    print("all")


def read_behind() -> None:
    """Read the last byte of a block, and then the next one."""
    spec = Spec(torch.float32, kv_heads=1, block_size=3, k_dim=64, v_dim=64, lengths=(3,))
    fenced = Fenced(Case(spec))
    end = fenced.addresses[0][0] + 3 * (64 + 64) * 4
    ctypes.string_at(end - 1, 1)
    print("the last byte", flush=True)
    ctypes.string_at(end, 1)


def in_a_process_of_its_own(call: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = sys.argv[1:]; import test_ends; test_ends.{call}"
    return forks.run(code, str(ROOT), str(HERE.parent), str(HERE))


def test_no_byte_behind_a_block_is_read(isa: str) -> None:
    done = in_a_process_of_its_own(f"read_all({isa!r})")
    assert done.returncode == 0, (done.returncode, done.stdout.splitlines()[-1:], done.stderr)
    assert done.stdout.endswith("all\n")


def test_a_read_behind_a_fenced_block_ends_the_process() -> None:
    # What the test above relies on.
    done = in_a_process_of_its_own("read_behind()")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "the last byte\n"), done.stderr
