"""What is compiled, when, and into what: found out without a GPU, in a process that compiles ahead of time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled import environment, report

from kvtier.kernels import tiles

ROOT = Path(__file__).resolve().parents[2]
#: Bytes of shared memory that a program may take, by capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
GROWTH = [
    {"blocks": 1, "short": 63, "rows": 1},
    {"blocks": 1, "short": 48, "rows": 1},
    {"blocks": 2, "short": 1, "rows": 2},
    {"blocks": 8, "rows": 1},
    {"blocks": 16, "rows": 16},
    {"blocks": 77, "short": 16, "rows": 3},
    {"blocks": 4096, "short": 7, "rows": 5},
    {"blocks": 65536, "rows": 1},
]


def keys(launches: list[dict[str, Any]], name: str) -> set[str]:
    return {launch["key"] for launch in launches if launch["name"] == name}


@pytest.fixture(autouse=True)
def _compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_importing_the_kernels_imports_no_triton() -> None:
    code = (
        "import sys, kvtier.kernels.paged, kvtier.kernels.copies, kvtier.kernels.tables;"
        "print([m for m in sys.modules if m.split('.')[0] == 'triton' or m.endswith('programs')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_nothing_is_compiled_again_while_contexts_batches_and_tables_grow() -> None:
    asked = {"compile": False, "call": "attend"}
    optional = {"mask": "bool", "lengths": True, "counts": True, "positions": True}
    shapes = [(33, 1), (64, 3), (100, 5), (999, 16), (2048, 999)]
    prefill = [asked | {"causal": True, "queries": q, "blocks": b} for q, b in shapes]
    tokens = [1, 2, 16, 17, 100, 1024]
    told = [asked | growth | optional for growth in GROWTH]
    ragged = [x | {"ragged": True} for x in prefill]
    other: dict[str, Any] = {"compile": False, "blocks": 64}
    appended = [other | {"call": "append", "queries": n, "start": s} for n in tokens for s in (0, 1, 16)]
    packed = [
        other | {"call": "append", "queries": n, "rows": r, "ragged": True, "starts": True}
        for n in tokens
        for r in (1, 2, 16, 1024)
    ]
    gathered = [other | {"call": "gather", "queries": n, "rows": 1 + n % 3} for n in tokens]
    copied = [{"compile": False, "call": "copy_blocks", "blocks": n} for n in tokens]
    decode = [asked | growth for growth in GROWTH]
    groups = [decode, told, prefill, ragged, appended, gathered, copied, packed]
    launches = report([request | {"tag": i} for i, group in enumerate(groups) for request in group])

    def variants(group: int, name: str) -> int:
        return len(keys([launch for launch in launches if launch["tag"] == group], name))

    assert [variants(i, "attend") for i in range(4)] == [1, 1, 1, 1]
    assert variants(0, "merge") == 2  # of two parts, and of more
    assert variants(4, "append") == 2  # of one token, and of more
    assert (variants(5, "gather"), variants(6, "copy")) == (1, 1)
    assert variants(7, "append") == 2


def test_one_merge_serves_tensors_however_far_from_each_other() -> None:
    asked = {"compile": False, "call": "merge"}
    apart = (0, 16, 2**20, 2**31, 2**33, -(2**31), 2**45, -(2**45))
    launches = report([asked | {"apart": n, "parts": parts} for n in apart for parts in (2, 3, 4)])
    assert len(launches) == 3 * len(apart)
    assert len(keys(launches, "merge")) == 2  # of two tensors, and of more
    assert len(keys(report([asked, asked | {"apart": 4}]), "merge")) == 2  # another alignment is another program


def test_what_is_launched_as_before_is_what_triton_would_launch() -> None:
    # A launcher asks Triton once: whatever it launches later must be the same variant.
    asked: dict[str, Any] = {"compile": False, "call": "attend"}
    r = random.Random(5)
    choices: dict[str, list[Any]] = {
        "dtype": ["bfloat16", "float16", "float32"],
        "k_dim": [128, 64, 33],
        "v_dim": [128, 64],
        "group": [4, 20],
        "queries": [1, 5, 40],
        "rows": [1, 3],
        "blocks": [1, 64, 300],
        "block_size": [64, 16],
        "positions": [False, True],
        "counts": [False, True],
        "lengths": [False, True],
        "ragged": [False, True],
        "columns": [False, True],
        "causal": [False, True],
        "window": [0, 0, 16, 99],
        "softcap": [0.0, 0.0, 1.0, 5.0],
        "mask": [None, None, "bool", "float16"],
        "out": ["float32", "bfloat16"],
        **{name: [False, False, True] for name in ("first_valid", "sinks", "slopes")},
        "integers": ["int64", "int32"],
    }
    usual = {name: some[0] for name, some in choices.items()}
    # Each thing changed alone, and then any number of them at once.
    requests = [asked | usual | {name: x} for name, some in choices.items() for x in some]
    requests += [asked | {name: r.choice(some) for name, some in choices.items()} for _ in range(100)]
    other: dict[str, Any] = {"compile": False, "block_size": 64}
    for name in ("merge", "append"):
        choice = {"rows": [1, 3], "dtype": choices["dtype"], "k_dim": [64, 20], "start": [0, 5], "queries": [1, 9]}
        choice |= {"starts": [False, True], "integers": ["int64", "int32"], "shift": [0, 1]}
        choice |= {"ragged": [False, True], "parts": [2, 3, 4]}
        requests += [other | {"call": name} | {x: r.choice(some) for x, some in choice.items()} for _ in range(60)]
    odd = asked | usual | {"k_dim": 33, "queries": 5}  # aligned as little as columns are
    requests += [odd, odd | {"columns": True}]
    told = asked | usual | {"lengths": True, "first_valid": True}
    requests += [told, told | {"integers": "int32"}]
    r.shuffle(requests)
    kept, fresh = (report([x | {"afresh": afresh} for x in requests]) for afresh in (False, True))
    # What is compiled in is what a new launcher would be told, and arguments are what the kept one was compiled for.
    assert [entry["key"] for entry in kept] == [entry["key"] for entry in fresh]
    variants: dict[int, set[str]] = {}
    for entry in kept:
        variants.setdefault(entry["launcher"], set()).add(entry["key"])
    assert {len(each) for each in variants.values()} == {1}
    assert len({entry["launcher"] for entry in kept}) < len({entry["launcher"] for entry in fresh}) * 0.9


def test_after_the_first_launch_the_driver_is_handed_the_same_without_asking_triton() -> None:
    # A later Triton will fuse no products and sums, unless it is told to.
    first, again, longer, split, resplit, eight, *others = launched(TRITON_DEFAULT_FP_FUSION="0")
    names = [[launch["name"] for launch in call] for call in (first, again, longer, split, resplit, eight)]
    assert names == [["attend"]] * 3 + [["attend", "merge"]] * 3
    asked = [[launch["by_triton"] for launch in call] for call in (first, again, longer, split, resplit, eight)]
    # With parts a fp32 tensor of another alignment is written, and there is a merge.
    assert asked[0] == [True]
    assert not any(asked[1] + asked[2] + asked[4] + asked[5])
    assert again == [first[0] | {"by_triton": False}]
    assert changed(first, longer) == [{4000: 4080}]
    assert [launch["grid"] for launch in eight] == [[16, 1, 1], [8, 1, 1]]
    assert all(len(a["args"]) == len(b["args"]) for a, b in zip(split, resplit, strict=True))
    assert [launch["function"] for launch in split] == [launch["function"] for launch in eight]
    assert all(launch["fused"] for call in (first, split) for launch in call)
    # A prepared call is the same; with a profiler's hook, every launch is Triton's own.
    plain = [{k: v for k, v in launch.items() if k not in ("args", "grid")} for launch in resplit]
    for call in others:
        hooked = call is others[-1]
        assert [{k: v for k, v in x.items() if k not in ("args", "grid")} for x in call] == [
            launch | {"hooks": hooked} for launch in plain
        ]
        assert [len(launch["args"]) for launch in call] == [len(launch["args"]) for launch in resplit]


def launched(*arguments: str, **variables: str) -> list[list[dict[str, Any]]]:
    """What `launched.py` says."""
    command = [sys.executable, Path(__file__).with_name("launched.py"), *arguments]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_where_stages_do_not_fit_fewer_are_taken_once() -> None:
    calls = launched("small")
    for (first,), (again,) in zip(calls[::2], calls[1::2], strict=True):
        assert first["shared"] <= SHARED[86]
        assert first["by_triton"]
        assert not again["by_triton"]
        assert again["function"] == first["function"]
    # Wide heads have no room for a second tile there, fp32 nowhere; the mask's tiles take as much as those of keys.
    assert [first["stages"] for (first,) in calls[::2]] == [3, 3, 1, 3]


def changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[Any, Any]]:
    """Of each launch, the arguments that differ."""
    pairs = [zip(a["args"], b["args"], strict=True) for a, b in zip(before, after, strict=True)]
    return [{x: y for x, y in pair if x != y} for pair in pairs]


def test_what_is_asked_for_is_compiled_in() -> None:
    # The other side of it: the test above can see a difference.
    asked = {"compile": False, "call": "attend"}
    launches = report([asked, asked | {"causal": True}, asked | {"window": 5}, asked | {"k_dim": 64}])
    assert len(keys(launches, "attend")) == 4


@pytest.mark.slow
def test_programs_compile_without_spills_and_read_sixteen_bytes_at_a_time() -> None:
    decode: dict[str, Any] = {"call": "attend", "blocks": 256}
    prefill = decode | {"queries": 2048, "causal": True}
    # A few of each kind; `compiled.py` reports on any.
    usual = [decode, prefill]
    wide = [decode | {"k_dim": 256}, prefill | {"k_dim": 64}]
    uneven = [decode | {"k_dim": 80}, prefill | {"k_dim": 192, "v_dim": 128}]
    short = [decode | {"block_size": 16, "positions": True}]
    older = [prefill | {"target": 80, "dtype": "float16"}]
    exact = [decode | {"dtype": "float32"}]
    for request, made in attended(usual + wide + uneven + short + older + exact):
        half = request.get("dtype") != "float32"
        # Without tensor cores the compiler prefers a few bytes of stack to more registers.
        assert made["stack"] <= (0 if half else 32), request
        assert made["shared"] <= SHARED[request.get("target", 90)], request
        assert made["ahead"] > 0, request
        found = made["accesses"]
        assert found["cp.async 16"] >= 8, request  # keys and values
        # Addresses are loaded by eight bytes and positions by four: nothing else is narrow.
        narrow = {"ld.b16", "ld.v2.b16", "st.b16", "cp.async 2"} & set(found)
        assert not narrow, (request, found)


def attended(requests: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    launches = [launch for launch in report(requests) if launch["name"] == "attend"]
    return list(zip(requests, launches, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (80, 80), (128, 128), (256, 256), (576, 512)])
def test_tiles_that_may_be_chosen_fit_and_read_ahead_without_spills(k_dim: int, v_dim: int) -> None:
    asked: dict[str, Any] = {"call": "attend", "blocks": 256, "causal": True, "k_dim": k_dim, "v_dim": v_dim}
    requests = []
    for number, queries in enumerate((1, 8, 16, 2048)):
        explicit = tiles.explicit_tile(k_dim, v_dim, 2, tiles.width(4 * queries))
        count = len(tiles.candidates(explicit, k_dim, v_dim, 2))
        target = (80, 90)[(number + k_dim // 16) % 2]
        requests += [asked | {"queries": queries, "target": target, "candidate": n} for n in range(count)]
    # Five stages of 64 x 32 of 256, and of 32 x 16 of 576 and 512, are more than 99 KiB: `Launcher` takes three there.
    smaller = {256: (1, 8), 576: (1,)}.get(k_dim, (1, 8, 16, 2048))
    requests += [asked | {"queries": queries, "target": 86, "candidate": 0} for queries in smaller]
    for request, entry in attended(requests):
        assert entry["stack"] <= (0 if request["target"] == 90 else 8), request
        assert entry["shared"] <= SHARED[request["target"]], request
        assert entry["accesses"]["cp.async 16"] >= 4, request
        # Keys wait for an address: with three stages nothing is read ahead.
        assert (entry["ahead"] > 0) == (entry["stages"] >= 5), request
        assert entry["stages"] >= 5 or request["candidate"], request


@pytest.mark.slow
def test_the_widest_heads_in_fp32_fit_the_smallest_devices() -> None:
    asked: dict[str, Any] = {"call": "attend", "blocks": 256, "dtype": "float32", "causal": True, "target": 86}
    heads = [{"k_dim": 256}, {"k_dim": 576, "v_dim": 512}]
    for request, entry in attended([asked | x | {"queries": n} for x in heads for n in (1, 64)]):
        assert entry["shared"] <= SHARED[86], request
        assert entry["stack"] <= 32, request


@pytest.mark.slow
@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 128), (256, 256), (512, 512), (576, 512)])
def test_all_options_at_once_fit_with_all_stages_on_the_largest_device(k_dim: int, v_dim: int) -> None:
    # A mask in fp32 has tiles of its own, and short blocks have the address of each token.
    asked: dict[str, Any] = {
        **{"call": "attend", "blocks": 256, "block_size": 16, "target": 90, "k_dim": k_dim, "v_dim": v_dim},
        **{"softcap": 30.0, "window": 512, "causal": True, "mask": "float32", "sinks": True, "slopes": True},
        **{"first_valid": True, "lengths": True, "counts": True, "positions": True},
    }
    for request, entry in attended([asked | {"queries": n} for n in (1, 2048)]):
        assert entry["shared"] <= SHARED[90], request
        assert entry["stages"] == 5, request
        assert entry["stack"] <= 96, request


@pytest.mark.slow
def test_merging_many_parts_reads_many_at_a_time_without_spills() -> None:
    decode = {"call": "attend", "blocks": 1024}
    heads = [{"k_dim": 64}, {"k_dim": 80}, {"k_dim": 128}, {"k_dim": 256}, {"k_dim": 576, "v_dim": 512, "kv_heads": 1}]
    requests = [decode | x | {"target": target} for x in heads for target in (80, 90)]
    merges = [launch for launch in report(requests) if launch["name"] == "merge"]
    for request, made in zip(requests, merges, strict=True):
        assert made["registers"] <= 64, request
        assert made["stack"] == 0, request
        assert made["accesses"]["ld.v4.b32"] >= (4 if request["k_dim"] == 64 else 8), request


@pytest.mark.slow
def test_whatever_is_asked_for_compiles() -> None:
    # The interpreter runs what the compiler may refuse.
    every: dict[str, Any] = {
        **{"softcap": 3.0, "window": 9, "causal": True, "sinks": True, "slopes": True, "first_valid": True},
        **{"lengths": True, "counts": True, "positions": True, "out": "bfloat16"},
    }
    asked = {"call": "attend", "blocks": 300}
    requests = [
        asked | every | {"mask": "bool", "block_size": 3, "k_dim": 17, "v_dim": 33, "columns": True},
        asked | every | {"mask": "float16", "queries": 100, "block_size": 1, "ragged": True},
        asked | {"mask": "bfloat16", "queries": 100, "block_size": 24, "first_valid": True, "columns": True},
        asked | {"window": 99, "causal": True, "queries": 12, "group": 5, "k_dim": 8, "dtype": "float32"},
        asked | {"queries": 70, "group": 1, "k_dim": 1, "dtype": "float16", "slopes": True},
    ]
    assert len(attended(requests)) == len(requests)


@pytest.mark.slow
def test_copies_move_sixteen_bytes_at_a_time() -> None:
    requests = [
        {"call": "copy_blocks"},
        {"call": "append", "queries": 100},
        {"call": "append", "queries": 100, "rows": 3, "ragged": True, "starts": True},
        {"call": "gather", "queries": 128},
        {"call": "gather", "queries": 128, "dtype": "float32", "k_dim": 80},
        {"call": "gather", "queries": 128, "dtype": "float32", "k_dim": 576, "v_dim": 512},
        {"call": "merge"},
        {"call": "merge", "parts": 3},
    ]
    for request, made in zip(requests, report(requests), strict=True):
        assert made["stack"] == 0
        assert made["accesses"].get("ld.v4.b32", 0) >= 2, (request, made)
        wide = "st.v2.b32" if request["call"] == "merge" else "st.v4.b32"  # 16 bytes of fp32 are 8 of bf16
        assert made["accesses"].get(wide, 0) >= 1, (request, made)
