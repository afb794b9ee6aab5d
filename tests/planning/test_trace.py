"""Trace files: the same from the simulator and the runtime, whole or not there, never larger than was said."""

from __future__ import annotations

import json
import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.shares import all_fetch
from kvtier.planning.reports import trace
from kvtier.planning.reports.trace import (
    Event,
    TraceWriter,
    busy_seconds,
    hidden_share,
    read_trace,
    timeline,
    write_trace,
)
from kvtier.planning.simulation.simulate import Simulation
from tests.planning.test_adaptive import LOAD, RATES, Machine
from tests.planning.traces import problems

ARGS = {"step": 0, "layer": 1, "blocks": 2, "bytes": 3}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("policy", [Adaptive, all_fetch])
def test_the_simulators_trace_has_all_that_its_records_have(policy: type, noise: float, tmp_path: Path) -> None:
    trial = Simulation(policy(), Machine(RATES, noise), LOAD, traced=True)
    trial.run(40)
    trial.write_trace(tmp_path / "x.json")
    assert problems(tmp_path / "x.json") == []
    found = read_trace(tmp_path / "x.json")
    for step, record in enumerate(trial.records):
        mine = [x for x in found if x.args["step"] == step]
        sums = {lane: sum(x.args["bytes"] for x in mine if x.lane == lane) for lane in ("up", "host")}
        assert sums == {"up": record.bytes_up, "host": record.host_bytes}
        stalled = sum(x.seconds or 0 for x in mine if x.lane == "stall")
        assert stalled == pytest.approx(record.stall_seconds, abs=1e-7)
        whole = [x for x in mine if x.lane == "step" and x.seconds is not None]
        assert [x.seconds for x in whole] == [pytest.approx(record.seconds, abs=1e-8)]
        # A step is computing, the host's attention with it, and stalls.
        computed = sum(x.seconds or 0 for x in mine if x.lane == "compute")
        assert computed + stalled == pytest.approx(record.seconds, abs=1e-6)


def test_a_plans_mark_says_what_was_decided_why_and_what_is_expected(tmp_path: Path) -> None:
    policy = Adaptive()
    trial = Simulation(policy, Machine(RATES), LOAD, traced=True)
    trial.run(40)
    marks = [x for x in trial.events if x.name == "plan"]
    assert len(marks) == 40
    assert all(x.seconds is None and x.args["policy"] == "Adaptive" for x in marks)
    assert [x.args["fetch_blocks"] for x in marks] == [sum(y.fetch for y in x.layers) for x in trial.plans]
    decisions = {x.step: x.reason for x in policy.decisions(1)}
    assert {x.args["decided_at_step"]: x.args["reason"] for x in marks} == decisions
    for mark, record in list(zip(marks, trial.records, strict=True))[20:]:
        assert mark.args["predicted_seconds"] == pytest.approx(record.seconds, rel=0.05)


def test_what_was_not_traced_is_no_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="traced=True"):
        Simulation(Adaptive(), Machine(RATES), LOAD).write_trace(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    events = [
        Event("step", "step 0", 1.0, 0.5, ARGS, "a"),
        Event("step", "plan", 1.25, None, ARGS, "a"),
        Event("up", "fetch", 1.25, 0.125, ARGS, "a", "cuda:1"),
        Event("up", "fetch", 1.25, 0.125, ARGS, "a", "cuda:0"),
        Event("compute", "layer", 1.5, 0.25, ARGS, "b", "cuda:0"),
    ]
    write_trace(tmp_path / "x.json", events)
    assert sorted(read_trace(tmp_path / "x.json"), key=str) == sorted(events, key=str)
    assert problems(tmp_path / "x.json") == []


@pytest.mark.parametrize("events", [0, 1])
def test_the_smallest_trace_is_a_trace(events: int, tmp_path: Path) -> None:
    write_trace(tmp_path / "x.json", [Event("up", "fetch", 0.0, 1.0, ARGS)] * events)
    assert problems(tmp_path / "x.json") == []
    assert len(read_trace(tmp_path / "x.json")) == events


def test_beyond_its_limit_events_are_counted_and_memory_stays_small(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "x.json", limit=2 * trace.CHUNK + 10)
    most = 0
    for i in range(3 * trace.CHUNK):
        writer.add(Event("up", "fetch", float(i), 0.5, ARGS))
        most = max(most, len(writer._buffer))
    writer.close()
    assert most < trace.CHUNK
    assert writer.dropped == trace.CHUNK - 10
    notes = json.loads((tmp_path / "x.json").read_text())["otherData"]
    assert (notes["events"], notes["dropped"]) == (2 * trace.CHUNK + 10, trace.CHUNK - 10)
    assert problems(tmp_path / "x.json") == []


def test_until_it_is_whole_the_old_file_stays_and_no_other_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(KeyError), TraceWriter(path) as writer:  # noqa: PT012 - leaving the block is the point
        for i in range(trace.CHUNK + 1):
            writer.add(Event("up", "fetch", float(i), 0.5, ARGS))
        assert path.read_text() == "old"
        raise KeyError
    assert problems(path) == []
    assert os.listdir(tmp_path) == ["x.json"]


class _Full:
    """A file on a disk that is full from the second write on."""

    def __init__(self, file: object) -> None:
        self._file = file
        self.writes = 0

    def write(self, data: bytes) -> int:
        self.writes += 1
        if self.writes > 1:
            raise OSError(28, "No space left on device")
        return self._file.write(data)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def test_a_full_disk_is_an_error_at_the_end_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    writer = TraceWriter(path)
    writer._file = _Full(writer._file)  # type: ignore[assignment]
    for i in range(3 * trace.CHUNK):
        writer.add(Event("up", "fetch", float(i), 0.5, ARGS))
    assert writer.dropped >= trace.CHUNK - 1
    with pytest.raises(OSError, match="No space"):
        writer.close()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_an_interrupt_in_the_middle_of_a_write_leaves_a_whole_file(tmp_path: Path) -> None:
    path, calls = tmp_path / "x.json", 0
    writer = TraceWriter(path)
    real = writer._file

    class Interrupted:
        def write(self, data: bytes) -> int:
            nonlocal calls
            calls += 1
            if calls == 1:
                real.write(data[:1000])
                raise KeyboardInterrupt
            return real.write(data)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    writer._file = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at the last of them
        for i in range(trace.CHUNK):
            writer.add(Event("up", "fetch", float(i), 0.5, ARGS))
    writer.close()
    assert problems(path) == []
    assert len(read_trace(path)) == trace.CHUNK, "and what was being written is in it"


def test_what_is_no_number_is_written_as_a_word(tmp_path: Path) -> None:
    write_trace(tmp_path / "x.json", [Event("up", "fetch", 0.0, 1.0, ARGS | {"a": math.inf, "b": math.nan})])
    assert read_trace(tmp_path / "x.json")[0].args["a"] == "inf"


def test_other_files_are_refused(tmp_path: Path) -> None:
    format_only = b'{"otherData": {"format": "kvtier trace 1"}}'
    for content in (b"[]", b"{}", b'{"traceEvents": [], "otherData": {}}', b"no json", b"\xff\x00", format_only):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.json is not a trace"):
            read_trace(tmp_path / "x.json")


def test_the_hidden_share_is_the_part_of_fetches_with_computing_at_the_same_time() -> None:
    events = [
        Event("up", "", 0.0, 4.0),
        Event("compute", "", 1.0, 1.0),
        Event("compute", "", 1.5, 1.0, device="other"),
        Event("up", "", 6.0, 2.0),
        Event("compute", "", 7.0, 9.0),
    ]
    assert hidden_share(events) == pytest.approx((1.5 + 1.0) / 6.0)
    assert hidden_share(events, "compute", "up") == pytest.approx(2.5 / 10.5)
    assert hidden_share(events, "down") is None
    assert busy_seconds(events, "compute") == pytest.approx(10.5)


def test_a_timeline_has_a_line_for_each_lane_from_top_to_bottom() -> None:
    events = [
        Event("step", "step 0", 0.0, 0.01, cache="a"),
        Event("up", "", 0.0, 0.0025, cache="a"),
        Event("compute", "", 0.005, 0.005, cache="a"),
    ]
    clock, step, compute, up = timeline(events, 20).splitlines()
    assert clock.split() == ["0", "10", "ms"]
    assert step.split()[:2] == ["a", "step"]
    assert compute.split()[2:] == ["." * 10 + "#" * 10, "5", "ms", "50%"]
    assert up.split()[2:] == ["#" * 5 + "." * 15, "2.5", "ms", "25%"]
    assert timeline([]) == "nothing happened"


def test_a_trace_replaces_a_file_where_a_link_leads_to_and_nothing_that_is_no_file(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "kept" / "x.json", tmp_path / "link.json", tmp_path / "pipe"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    write_trace(link, [Event("up", "fetch", 0.0, 1.0, ARGS)])
    assert link.is_symlink()
    assert [x.name for x in read_trace(target)] == ["fetch"]
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="something else"):
        TraceWriter(pipe)
    assert pipe.is_fifo()
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["kept", "link.json", "pipe", "x.json"]


def test_numbers_of_any_kind_are_written(tmp_path: Path) -> None:
    """A policy may predict with those of another library."""
    args = {"half": Fraction(1, 2), "nan": Decimal("nan"), "three": torch.tensor(3), "what": object}
    write_trace(tmp_path / "x.json", [Event("step", "plan", 0.0, None, args)])
    (found,) = read_trace(tmp_path / "x.json")
    assert {x: found.args[x] for x in ("half", "nan", "three")} == {"half": 0.5, "nan": "nan", "three": 3}
    assert "object" in found.args["what"]


def test_a_file_that_cannot_be_made_is_named_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(FileNotFoundError) as found:
        write_trace(path, [])
    assert found.value.filename == str(path)
