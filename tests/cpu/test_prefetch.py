"""Who prefetches changes no bit, and the faster way is found whatever the machine does."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from problems import DTYPES, Case, Spec, attend, random_spec

from kvtier.cpu import build, native
from kvtier.errors import ConfigError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    if native.available():
        native.use_prefetch("learned")


# Whole tiles and the ends of them, panels of values, passes over keys, halves and quarters of the heads.
SPECS = [
    Spec(kv_heads=8, group=group, k_dim=dim, v_dim=dim, block_size=size, lengths=(length, 300))
    for group, dim, size, length in (
        (1, 128, 256, 1300),
        (2, 128, 64, 2100),
        (3, 64, 16, 700),
        (4, 128, 256, 2049),
        (4, 128, 1024, 1100),
        (4, 80, 17, 600),
        (7, 96, 64, 900),
        (8, 128, 512, 1025),
        (16, 256, 16, 200),
    )
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_way_gives_the_same_bits_on_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    random = [random_spec(number, dtype) for number in range(12 if isa == "portable" else 40)]
    for spec in (*random, *(spec for spec in SPECS if isa != "portable")):
        case = Case(Spec(**{**vars(spec), "dtype": dtype}))
        found = []
        for way, threads in (("software", 1), ("hardware", 1), ("hardware", 3), ("learned", 2), ("software", 2)):
            native.use_prefetch(way)
            found.append(attend(case, threads=threads))
        for other in found[1:]:
            assert torch.equal(found[0].out, other.out), case.spec
            assert torch.equal(found[0].lse, other.lse), case.spec


def test_another_way_is_refused(isa: str) -> None:
    with pytest.raises(ConfigError, match="software, hardware or learned"):
        native.use_prefetch("none")


Half = tuple[int, int, int]
Run = Callable[..., tuple[Half, Half]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs tasks on an emulated machine. Of each half of them: how often software was chosen, in all and in the second
    half of it, and by how much it leads at the end."""
    try:
        compiler = build.compiler()
    except build.BuildError:
        pytest.skip("there is no C++ compiler here")
    program = tmp_path_factory.mktemp("contest") / "check"
    source = HERE / "contest_check.cpp"
    subprocess.run([*compiler, "-std=c++17", "-O1", f"-I{build.SOURCE}", str(source), "-o", str(program)], check=True)

    def run(software: float, hardware: float, *, cold: float = 1, call: int = 1, held: int = 0) -> tuple[Half, Half]:
        numbers = (software, hardware, cold, call, held, 10_000)
        done = subprocess.run([program, *map(str, numbers)], capture_output=True, text=True, check=True)
        first, second = (line.split() for line in done.stdout.splitlines())
        return (int(first[0]), int(first[1]), int(first[2])), (int(second[0]), int(second[1]), int(second[2]))

    return run


@pytest.mark.parametrize(("call", "cold"), [(1, 1), *itertools.product((2, 3, 4, 6, 32), (1.5, 4))])
@pytest.mark.parametrize("held", [0, 10])
def test_the_faster_way_is_found_and_followed(run: Run, call: int, cold: float, held: int) -> None:
    for software, hardware in ((30_000, 40_000), (40_000, 30_000)):
        before, after = run(software, hardware, cold=cold, call=call, held=held)
        for (_, late, lead), faster in ((before, software < hardware), (after, software > hardware)):
            assert (lead > 0) == faster
            # In 66 tasks one goes the other way; if the counter leaves its end for a while, some more.
            slower = 5_000 - late if faster else late
            assert slower < 5_000 / 66 * (3 if held or cold > 1 else 1.1), (software, late)


def test_where_both_ways_are_as_fast_either_is_taken(run: Run) -> None:
    (chosen, _, _), _ = run(30_000, 30_000)
    assert 0 < chosen < 10_000


def test_tasks_that_are_too_short_to_tell_do_not_count(run: Run) -> None:
    assert [lead for _, _, lead in run(2_000, 1_000)] == [0, 0]
    assert [chosen for chosen, _, _ in run(2_000, 1_000)] == [10_000, 10_000]  # as where nothing is known
