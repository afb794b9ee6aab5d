"""The benchmarks run at tiny sizes, record what they measured, and leave no process behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import kvtier
from benchmarks.__main__ import main, parse_args
from benchmarks.contenders import STATS, Case, contender, tier_facts
from benchmarks.models import SHAPES, Geometry, config_of
from benchmarks.neighbour import Neighbour
from benchmarks.records import RESULTS, Recorder, read, turns_of
from benchmarks.scenarios import decode, hotpath, overlap, planner, predictions
from benchmarks.scenarios.decode import fit
from benchmarks.turns import Outcome, compare

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 6
TINY = ("--model=qwen3-tiny", "--device=cpu", "--rounds=2", "--new-tokens=2", "--contenders=dynamic,kvtier")


@pytest.fixture(autouse=True)
def _restored_threads() -> Any:
    threads = torch.get_num_threads()
    with torch.device("cpu"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def _six_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen3-tiny", SHAPES["qwen3-tiny"] | {"num_hidden_layers": LAYERS})


def records(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Of a run of `python -m benchmarks`."""
    assert main([*TINY, *arguments, f"--out={out}"]) == 0
    return read(out)


def test_small_sizes_are_recorded_among_the_results_only_when_asked(tmp_path: Path) -> None:
    known = {"decode": decode}
    assert parse_args(["--device=cpu"], known)[1].out == RESULTS
    assert parse_args(["--device=cpu", "--quick", f"--out={tmp_path}"], known)[1].out == tmp_path
    small = parse_args(["--device=cpu", "--quick"], known)[1].out
    assert small.is_dir()
    assert not small.is_relative_to(ROOT)
    small.rmdir()


@pytest.mark.usefixtures("_six_layers")
def test_decoding_is_measured_by_the_bare_loop_and_through_generate(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "decode", "--contexts=16,32,64", "--batch=2")
    assert {r["status"] for r in found} == {"ok"}
    turns = [r for r in found if "summary" not in r["workload"]]
    assert [(r["workload"]["through"], r["workload"]["context"], r["contender"]) for r in turns] == [
        (through, context, name)
        for through in ("loop", "generate")
        for context in (16, 32, 64)
        for name in ("dynamic", "kvtier")
    ]
    assert {r["workload"]["batch"] for r in found} == {2}
    geometry = LAYERS * 2 * 2 * 16 * 4  # bytes of a token
    assert turns[0]["workload"]["kv_bytes"] == 2 * (16 + 3 + 2 * 2) * geometry
    summaries = [r for r in found if "summary" in r["workload"]]
    assert [r["contender"] for r in summaries] == ["dynamic", "kvtier"] * 2
    assert all(r["facts"]["least_ratio"] > 0 for r in summaries)


def test_the_audit_is_compared_with_none(tmp_path: Path) -> None:
    options = ("audit", "--contexts=64", "--cases=host", "--contenders=kvtier:off,kvtier:sampled,kvtier:full")
    found = records(tmp_path / "r.jsonl", *options)
    assert [(r["contender"], r["ratio"]["to"]) for r in found if "contender" in r] == [
        (name, "kvtier:off") for name in ("kvtier:off", "kvtier:sampled", "kvtier:full")
    ]
    assert found[-1]["verdict"] in ("met", "missed")
    with pytest.raises(ValueError, match="unknown contender"):
        contender("dynamic:full")


def test_predictions_are_of_sizes_that_were_left_out(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "predictions", "--quick", "--threads=1", "--cases=copies")
    assert [r["contender"] for r in found] == ["copies, up", "copies, down"]
    for record in found:
        assert record["n"] == len(record["facts"]["points"]) > 0
        errors = [abs(predicted / seconds - 1) for _, seconds, predicted in record["facts"]["points"]]
        assert record["median"] == pytest.approx(sum(errors) / len(errors))


@pytest.mark.usefixtures("_six_layers")
def test_an_update_alone_is_compared_with_itself_at_the_shortest_context(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "update", "--cases=alone", "--contexts=64,16")
    assert [(r["contender"], r["workload"]["context"], r["ratio"]["to"]) for r in found] == [
        (f"{name} at {context}", context, f"{name} at 16") for name in ("dynamic", "kvtier") for context in (16, 64)
    ]


@pytest.mark.slow
def test_the_share_on_the_host_is_what_was_asked_for(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "share", "--contexts=128", "--block-size=8")
    assert {r["status"] for r in found} == {"ok"}
    for record in found[1:]:
        assert record["facts"]["host_percent"] == pytest.approx(record["workload"]["host_share"], abs=15)
    assert [r["workload"]["host_share"] for r in found[1::2]] == [0, 10, 25, 50, 75, 100]


def test_the_hot_path_is_measured_on_one_thread_and_held_against_its_targets(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    out = tmp_path / "r.jsonl"
    arguments = ["--model=llama-12x128", "--device=cpu", "--rounds=2", "--new-tokens=2"]
    assert main(["hotpath", *arguments, f"--out={out}"]) == 0
    found = read(out)
    measured = [(r["workload"]["part"], r["contender"]) for r in found if "contender" in r]
    assert measured == [
        ("update and attention", "dynamic"),
        ("update and attention", "kvtier"),
        ("update and attention", "kvtier@60%"),
        ("whole step", "dynamic"),
        ("whole step", "kvtier"),
        ("whole step", "enabled"),
    ]
    assert {r["workload"]["threads"] for r in found if "contender" in r} == {1}
    assert {r["workload"]["context"] for r in found} == {256}
    low, high = hotpath.SPLIT_SHARES
    assert low < found[2]["facts"]["host_share"] < high
    limits = [r["limit"] for r in found if "target" in r]
    assert limits == ["<= 1.25", "<= 45", "<= 1.66667", "<= 60", *["<= 1.03947", "<= 9"] * 2]
    assert all(r["figure"] is not None for r in found if "target" in r)
    assert torch.get_num_threads() == 2


def test_the_targets_of_the_hot_path_are_computed_within_rounds() -> None:
    base = Outcome(values={0: 40.0, 1: 20.0, 2: 80.0})
    host = Outcome(values={0: 50.0, 1: 24.0, 2: 88.0})
    split = Outcome(values={0: 60.0, 1: 30.0}, facts={"host_share": 0.5})
    found = hotpath.layer_targets({"dynamic": base, "kvtier": host, "kvtier@60%": split})
    assert [target.figure for target in found] == pytest.approx([1.2, 50.0, 1.5, 45.0])
    assert [target.verdict for target in found] == ["met", "missed", "met", "met"]
    split.facts["host_share"] = 0.0  # all blocks are on the device: no split layer was measured
    found = hotpath.layer_targets({"dynamic": base, "kvtier": host, "kvtier@60%": split})
    assert [target.verdict for target in found][2:] == ["no figure", "no figure"]
    found = hotpath.step_targets({"dynamic": base, "kvtier": host, "enabled": base})
    assert [target.figure for target in found] == pytest.approx([1.2, 8.0, 1.0, 0.0])
    assert [target.figure for target in hotpath.step_targets({"kvtier": host})] == [None] * 4


def test_policies_are_compared_on_an_emulated_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEARN": 2, "SETTLE": 1, "STEPS": 24, "SHOWN": 4, "LINEAR": 1e-4, "BLOCK": 16}.items():
        monkeypatch.setattr(planner, name, value)
    threads, out = torch.get_num_threads(), tmp_path / "r.jsonl"
    arguments = ["--quick", "--device=cpu", "--rounds=1", "--new-tokens=3", "--contexts=256"]
    assert main(["planner", *arguments, f"--out={out}"]) == 0
    found = read(out)
    assert {r["status"] for r in found} == {"ok"}
    shares = [r for r in found if "contender" in r and "link" in r["workload"] and "change" not in r["workload"]]
    assert [r["contender"] for r in shares[:7]] == [*planner.POLICIES, "share 20%", "share 50%", "share 80%"]
    facts = {r["contender"]: r["facts"] for r in shares[:7]}
    assert facts["all-fetch"]["bytes_up_per_step"] > facts["share 50%"]["bytes_up_per_step"] > 0
    assert facts["all-attend"]["bytes_up_per_step"] == 0
    assert facts["all-attend"]["host_bytes_per_step"] > facts["share 50%"]["host_bytes_per_step"]
    assert shares[7]["contender"] == "resident"
    assert [r["contender"] for r in found if "change" in r.get("workload", {})] == [
        "adaptive",
        "share 20%",
        "share 40%",
    ]
    targets = [r["target"] for r in found if "target" in r]
    assert len(targets) == 9
    (own,) = [r for r in found if r.get("workload", {}).get("part") == "own" and "contender" in r]
    assert own["workload"]["layers"] == 64
    assert 0 < own["min"] <= own["median"] <= own["max"]
    assert all(r["figure"] is not None for r in found if "target" in r)
    assert torch.get_num_threads() == threads


def test_what_hides_is_read_from_a_trace_and_explain_compared_with_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LEARN": 2, "SETTLE": 1, "LINEAR": 2e-3, "BLOCK": 16}.items():
        monkeypatch.setattr(planner, name, value)
    found = records(
        tmp_path / "r.jsonl",
        "overlap",
        *("--quick", "--device=cpu", "--contexts=256", "--new-tokens=6", "--contenders=all-fetch@40%,adaptive@40%"),
    )
    resident, fetching, adaptive = (r["facts"] for r in found if "contender" in r)
    assert resident["of_longer"] is None
    assert fetching["of_longer"] > 0
    assert 0 < fetching["hidden_share"] <= 1
    assert fetching["predicted_ms"] is None
    assert fetching["link_seconds_per_step"] > 0 < fetching["compute_seconds_per_step"]
    assert adaptive["clock_ms"] > 0 < adaptive["seen_ms"]
    assert any("of the longer of copies" in r.get("target", "") for r in found)


def test_where_one_contender_cannot_be_traced_the_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, seen = overlap.observe, list[Any]()

    def some(session: Any, **options: int) -> Any:
        seen.append(session)
        if len(seen) == 1:
            raise RuntimeError("an error of a kernel")
        return observe(session, **options)

    for name, value in {"LEARN": 2, "SETTLE": 1, "LINEAR": 2e-3, "BLOCK": 16}.items():
        monkeypatch.setattr(planner, name, value)
    monkeypatch.setattr(overlap, "observe", some)
    options = ("overlap", "--model=llama-6x32", "--device=cpu", "--quick", "--contexts=256", "--new-tokens=6")
    assert main([*options, "--contenders=adaptive@40%", f"--out={tmp_path / 'r.jsonl'}"]) == 1
    found = [r for r in read(tmp_path / "r.jsonl") if "contender" in r]
    assert [(r["contender"], r["status"]) for r in found] == [("default@100%", "failed"), ("adaptive@40%", "ok")]
    assert found[0]["reason"] == "RuntimeError: an error of a kernel"


def test_where_one_kind_cannot_be_measured_the_others_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the link is gone")

    monkeypatch.setattr(predictions.link, "measure", gone)
    options = ("predictions", "--device=cpu", "--quick", "--cases=copies,prefill", "--threads=1")
    assert main([*options, f"--out={tmp_path / 'r.jsonl'}"]) == 1
    found = read(tmp_path / "r.jsonl")
    assert [(r["contender"], r["status"]) for r in found] == [("copies", "failed"), ("prefill", "ok")]


def test_steps_until_a_limit_are_counted_by_medians() -> None:
    seconds = [4.0] * 20 + [1.0] * 20
    seconds[30] = 9.0  # one that somebody else delayed
    assert planner.steps_until(seconds, 2.0) == 20 - planner.SHOWN // 2 + 1
    assert planner.steps_until(seconds, 0.5) == 40


def test_a_tiered_cache_says_all_that_records_have_of_it() -> None:
    """For other commits, statistics that are not found are left out. Here none is missing."""
    config = config_of("qwen3-tiny")
    cache = contender("kvtier").build(
        Case(config, Geometry.of(config, torch.float32), torch.device("cpu"), 1, 1, block_size=4)
    )
    assert set(tier_facts(cache)) == {*STATS, "device_blocks", "host_blocks"}


def test_caches_of_others_run_under_the_attention_of_transformers_alone() -> None:
    config = config_of("qwen3-tiny")
    cache = kvtier.TieredKVCache(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    entries = AttentionInterface._global_mapping
    before = entries["sdpa"]
    assert before is not sdpa_attention_forward
    with contender("dynamic").attention(model):
        assert entries["sdpa"] is sdpa_attention_forward
    with contender("kvtier").attention(model):
        assert entries["sdpa"] is before
    assert entries["sdpa"] is before
    cache.close()


def test_a_fitted_line_says_how_far_points_are_from_it() -> None:
    line = fit({1: 5.0, 2: 7.0, 10: 23.0})
    assert (line.base, line.slope, line.off) == pytest.approx((3.0, 2.0, 0.0))
    assert fit({1: 5.0, 2: 7.0, 10: 40.0}).off > 0.05


def test_a_part_that_no_scenario_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["update", "--cases=busy"])
    assert ended.value.code == 2
    assert "no busy here; there are alone, attend" in capsys.readouterr().err


@pytest.mark.usefixtures("_six_layers")
def test_bytes_written_back_are_counted_over_whole_blocks_only(tmp_path: Path) -> None:
    arguments = ("decode", "--cases=loop", "--contexts=128", "--contenders=kvtier@50%,fetch@25%")
    geometry = LAYERS * 2 * 2 * 16 * 4
    for tokens in (2, 4):  # two turns make half a block, and a whole one
        out = tmp_path / f"{tokens}.jsonl"
        found = records(out, *arguments, "--block-size=8", f"--new-tokens={tokens}")
        assert {r["workload"]["token_bytes"] for r in found} == {geometry}
        facts = [r["facts"] for r in found]
        if tokens == 2:
            assert [f["bytes_down_per_token"] for f in facts] == [None, None]
        else:
            assert [f["bytes_down_per_token"] - f["backlog_bytes_per_token"] for f in facts] == [geometry] * 2
        away = [f["host_bytes"] / r["workload"]["kv_bytes"] for f, r in zip(facts, found, strict=True)]
        assert 0.4 < away[0] < 0.6
        assert 0.75 <= away[1] < 1  # what is fetched has its place in the budget too
        assert not turns_of(out).exists()


def test_a_record_says_what_computed(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "update", "--cases=attend", "--contexts=16", "--no-cudnn-attention")
    assert {r["kernels"] for r in found} == {"torch"}
    assert {r["cudnn_attention"] for r in found} == {False}
    assert all("instruction_set" in r and "cudnn" in r["versions"] and "triton" in r["versions"] for r in found)
    torch.backends.cuda.enable_cudnn_sdp(True)


class Counting:
    """A trial that counts its turns, and fails after `fails` of them."""

    def __init__(self, fails: int = -1) -> None:
        self.fails = fails
        self.turns = 0

    def measure(self) -> float:
        """How many turns there were before."""
        self.turns += 1
        if self.turns > self.fails >= 0:
            raise RuntimeError("measuring fails")
        return float(self.turns)

    def facts(self) -> dict[str, Any]:
        """None."""
        return {}

    def close(self) -> None:
        """Fails too: the device may be broken."""
        if self.fails >= 0:
            raise RuntimeError("closing fails")


def test_a_contender_that_fails_even_when_it_is_closed_leaves_the_others_their_values() -> None:
    seen: list[tuple[str, int]] = []

    def on_turn(name: str, turn: int, outcome: Outcome) -> None:
        seen.append((name, turn))

    starts = {"healthy": Counting, "failing": lambda: Counting(1)}
    found = compare(starts, rounds=3, together=True, allowance=60.0, progress=lambda text: None, on_turn=on_turn)
    assert found["healthy"].values == {0: 1.0, 1: 2.0, 2: 3.0}
    assert (found["failing"].status, found["failing"].values) == ("failed", {})
    assert sorted(seen) == [("failing", 0), ("healthy", 0), ("healthy", 1), ("healthy", 2)]


def test_no_turn_begins_when_time_is_up() -> None:
    starts = {"one": Counting}
    found = compare(
        starts, rounds=3, together=True, allowance=60.0, progress=lambda text: None, until=time.monotonic() - 1
    )
    assert found["one"].status == "not reached in time"


def test_turns_stay_until_their_comparison_has_its_records(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.jsonl", torch.device("cpu"), emulated=True)
    recorder.begin_turns("decode")
    recorder.turn("decode", turn=0)  # cut off
    recorder.begin_turns("decode")
    recorder.turn("decode", turn=1)
    recorder.turn("decode", turn=2)
    file = turns_of(tmp_path / "r.jsonl")
    assert [turn["turn"] for turn in read(file)] == [0, 1, 2]
    recorder.drop_turns("decode")
    assert [turn["turn"] for turn in read(file)] == [0]


def test_a_partial_line_is_not_a_record(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"a": 1}\n{"b": \n{"c": 3}\n{"d"')
    assert read(file) == [{"a": 1}, {"c": 3}]


def ended(pid: int, seconds: float = 120.0) -> bool:
    """Whether a process is gone, or is so within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins a process to a core")


@linux
def test_a_busy_neighbour_ends_with_its_block_whatever_ends_that() -> None:
    neighbour = Neighbour(max(os.sched_getaffinity(0)))
    with contextlib.suppress(KeyboardInterrupt), neighbour:
        assert neighbour.child.poll() is None
        assert os.sched_getaffinity(neighbour.child.pid) == {neighbour.core}
        raise KeyboardInterrupt
    assert neighbour.child.poll() is not None


@linux
def test_a_busy_neighbour_ends_when_its_parent_is_killed() -> None:
    script = (
        "import os, sys, time\nfrom benchmarks.neighbour import Neighbour\n"
        "with (n := Neighbour(max(os.sched_getaffinity(0)))):\n    print(n.child.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not ended(pid, 0.1)
    parent.kill()
    parent.communicate()
    assert ended(pid)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_launching_is_counted_without_a_device_and_everything_is_put_back(tmp_path: Path) -> None:
    """In a process of its own: others may interpret Triton's programs."""
    code = (
        "import sys; from benchmarks.__main__ import main; from kvtier.kernels import copies, launch, paged;"
        "from triton.runtime.driver import driver;"
        "state = lambda: [paged.available, copies.available, launch._processors, driver._active];"
        "before = state(); status = main(sys.argv[1:]); assert state() == before; sys.exit(status)"
    )
    out = tmp_path / "r.jsonl"
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "KVTIER_KERNELS")}
    command = [sys.executable, "-c", code, "launch", "--quick", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = read(out)
    assert [(r["contender"], r["status"], r["unit"]) for r in found] == [
        (name, "ok", "us/layer") for name in ("plain", "prepared")
    ]
