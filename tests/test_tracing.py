"""`kvtier.trace`: what really moved, once and with its bytes, in a file that is whole however its block is left."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.nn.functional as F

import kvtier
from kvtier import ConfigError, TieredKVCache, tracing
from kvtier.forward import planned
from kvtier.planning.reports.trace import Event, busy_seconds, read_trace
from kvtier.stats import CacheStats
from kvtier.testing import failing, held, with_doubles
from kvtier.tracing import Trace
from tests.planning.traces import problems

pytestmark = pytest.mark.usefixtures("on_the_host", "one_thread")
LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4


def spilled(policy: str = "default", engine: str = "inline", *, host_attention: bool = True) -> TieredKVCache:
    """A cache whose device holds a part of what `fill` gives it."""
    cache = TieredKVCache(
        device_budget="40KiB", host_budget="1MiB", block_size=BLOCK, policy=policy, host_attention=host_attention
    )
    return cache if engine == "inline" else with_doubles(cache, held(1, late=engine == "late"))


def new(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def fill(cache: TieredKVCache, tokens: int = 200) -> None:
    for layer in range(LAYERS):
        cache.update(new(tokens), new(tokens), layer)


def decode(cache: TieredKVCache, steps: int, layers: int = LAYERS) -> list[torch.Tensor]:
    found = []
    for i in range(steps):
        for layer in range(layers):
            token = new(1, 1000 + i * LAYERS + layer)
            found.append(F.scaled_dot_product_attention(token, *cache.update(token, token, layer)))
    return found


def moved(before: CacheStats, after: CacheStats) -> dict[str, int]:
    return {
        "up": after.bytes_up - before.bytes_up,
        "down": after.bytes_down - before.bytes_down,
        "host": after.host_bytes - before.host_bytes,
    }


def sums(events: list[Event], name: str = "bytes") -> dict[str, int]:
    return {lane: sum(x.args[name] for x in events if x.lane == lane) for lane in ("up", "down", "host")}


@pytest.mark.parametrize("engine", ["inline", "held", "late"])
@pytest.mark.parametrize("policy", ["default", "all-fetch", "adaptive"])
@pytest.mark.parametrize("host_attention", [True, False])
def test_every_byte_that_moved_is_in_the_trace_once(
    engine: str, policy: str, host_attention: bool, tmp_path: Path
) -> None:
    cache = spilled(policy, engine, host_attention=host_attention)
    fill(cache)
    decode(cache, 2)
    before = cache.stats
    with kvtier.trace(tmp_path / "x.json"):
        decode(cache, 6)
    after = cache.stats
    assert problems(tmp_path / "x.json") == []
    events = read_trace(tmp_path / "x.json")
    assert sums(events) == moved(before, after)
    assert sum(x.args["blocks"] for x in events if x.lane == "up") == after.block_fetches - before.block_fetches
    assert {x.args["layer"] for x in events if x.lane in ("up", "down", "host")} <= set(range(LAYERS))
    for lane, seconds in (("host", "host_seconds"), ("stall", "stall_seconds")):
        assert busy_seconds(events, lane) == pytest.approx(getattr(after, seconds) - getattr(before, seconds), abs=1e-6)
    # It was worth looking: something moved each way that this policy has.
    if policy == "all-fetch" or not host_attention:
        assert moved(before, after)["up"]
    else:
        assert moved(before, after)["host"]


@pytest.mark.parametrize("engine", ["inline", "late"])
def test_each_step_has_its_layers_its_plan_and_its_numbers(engine: str, tmp_path: Path) -> None:
    cache = spilled("all-fetch", engine)
    fill(cache)
    with kvtier.trace(tmp_path / "x.json"):
        decode(cache, 5)
    events = read_trace(tmp_path / "x.json")
    steps = [x for x in events if x.lane == "step" and x.seconds is not None]
    assert [x.name for x in steps] == [f"step {i}" for i in range(5)]
    for i, step in enumerate(steps):
        mine = [x for x in events if x.args["step"] == i]
        (plan,) = [x for x in mine if x.name == "plan"]
        assert plan.args["policy"] == "FixedShare"
        assert plan.args["fetch_blocks"] > 0
        names = [x.name for x in mine if x.lane == "compute"]
        assert list(dict.fromkeys(names))[: 2 * LAYERS] == [
            name for n in range(LAYERS) for name in (f"layer {n}", f"attention {n}")
        ]
        assert (step.args["bytes_up"], step.args["tokens"]) == (sums(mine)["up"], 1)
        # What is not computed, and no wait, is nothing: the device is the CPU.
        whole = sum(x.seconds or 0 for x in mine if x.lane in ("compute", "stall", "wait"))
        assert whole == pytest.approx(step.seconds, abs=1e-5)


def test_under_a_trace_tokens_are_the_same_and_afterwards_calls_are_repeated_again(tmp_path: Path) -> None:
    def outputs(traced: bool) -> list[torch.Tensor]:
        cache = TieredKVCache(block_size=BLOCK)
        fill(cache, 20)
        found = decode(cache, 2)
        repeats = [reader.repeat is not None for reader in cache._forward.readers.values()]
        if traced:
            with kvtier.trace(tmp_path / "x.json"):
                found += decode(cache, 3)
        else:
            found += decode(cache, 3)
        found += decode(cache, 2)
        assert [reader.repeat is not None for reader in cache._forward.readers.values()] == repeats
        return found

    assert all(torch.equal(a, b) for a, b in zip(outputs(True), outputs(False), strict=True))
    events = read_trace(tmp_path / "x.json")
    assert sum(x.lane == "host" for x in events) == 3 * LAYERS, "each call, though it could be repeated"


def test_without_a_trace_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*args: object, **options: object) -> None:
        raise AssertionError("somebody tells")

    for name in ("step", "plan", "attention", "stall", "waited", "host", "copied"):
        monkeypatch.setattr(Trace, name, told)
    cache = spilled("all-fetch", "late")
    fill(cache)
    decode(cache, 3)


def test_one_trace_at_a_time_and_each_once(tmp_path: Path) -> None:
    first = kvtier.trace(tmp_path / "a.json")
    with first:
        with pytest.raises(ConfigError, match=r"a\.json"), kvtier.trace(tmp_path / "b.json"):
            pass
        with pytest.raises(ConfigError, match="one at a time"), first:
            pass
        assert tracing.active is first
    with pytest.raises(ConfigError, match="Make a new one"), first:
        pass
    with kvtier.trace(tmp_path / "b.json"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    assert problems(tmp_path / "a.json") == []


def test_a_process_that_is_forked_inside_records_nothing_and_may_trace_what_it_does(tmp_path: Path) -> None:
    code = """
import os, sys
import kvtier
from kvtier import tracing
with kvtier.trace("x.json") as trace:
    if not os.fork():
        assert tracing.active is None
        with kvtier.trace("own.json"):
            pass
        sys.exit()  # through the parent's block
    os.wait()
    assert tracing.active is trace
print(*sorted(os.listdir()))
"""
    done = forks.run(code, cwd=tmp_path)
    assert done.stdout == "own.json x.json\n", done.stderr
    assert problems(tmp_path / "x.json") == []


def test_a_trace_that_another_thread_ends_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        """A module in which each second look finds no trace."""

        looks = 0

        @property
        def active(self) -> Trace | None:
            self.looks += 1
            return ended if self.looks % 2 else None

    ended = kvtier.trace("x.json")
    for name in ("step", "plan"):
        monkeypatch.setattr(Trace, name, lambda *_: None)
    cache = spilled("all-fetch")
    fill(cache)
    monkeypatch.setattr(planned, "tracing", Ending())
    decode(cache, 3)


def test_a_path_that_cannot_be_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trace at"), kvtier.trace(tmp_path / "no" / "such.json"):
        pass
    assert tracing.active is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("engine", ["inline", "late"])
def test_a_forward_that_raises_leaves_a_whole_file(engine: str, error: type[BaseException], tmp_path: Path) -> None:
    cache = spilled("all-fetch", engine)
    fill(cache)
    with pytest.raises(error), kvtier.trace(tmp_path / "x.json"):  # noqa: PT012 - leaving the block is the point
        decode(cache, 3)
        decode(cache, 1, layers=1)
        raise error
    assert tracing.active is None
    assert problems(tmp_path / "x.json") == []
    events = read_trace(tmp_path / "x.json")
    assert [x.name for x in events if x.lane == "step" and x.seconds is not None] == [f"step {i}" for i in range(4)]
    assert json.loads((tmp_path / "x.json").read_text())["otherData"]["interrupted_by"] == error.__name__
    cache.crop(0)
    decode(cache, 1)
    cache.check_integrity()


def test_a_fetch_that_fails_is_shown_as_one(tmp_path: Path) -> None:
    cache = spilled("all-fetch")
    fails = False
    with_doubles(cache, failing(lambda transfer: fails and transfer.direction == "fetch"))
    fill(cache)
    fails = True
    with kvtier.trace(tmp_path / "x.json"):
        decode(cache, 1)
    assert problems(tmp_path / "x.json") == []
    fetches = [x for x in read_trace(tmp_path / "x.json") if x.lane == "up"]
    assert fetches
    assert all("made to fail" in x.args["failed"] for x in fetches)


def test_a_cache_that_is_closed_inside_has_all_it_did_in_the_trace(tmp_path: Path) -> None:
    cache = spilled("all-fetch", "late")
    with kvtier.trace(tmp_path / "x.json"):
        fill(cache)
        decode(cache, 3)
        counters = cache._forward.counters
        cache.close()
    events = read_trace(tmp_path / "x.json")
    assert problems(tmp_path / "x.json") == []
    assert sums(events)["up"] == counters.bytes_up > 0
    assert sums(events)["down"] == counters.bytes_down > 0


def test_caches_of_several_threads_have_lanes_of_their_own(tmp_path: Path) -> None:
    caches = [spilled("all-fetch", "late") for _ in range(3)]
    errors: list[BaseException] = []

    def work(cache: TieredKVCache) -> None:
        try:
            with torch.device("cpu"):
                fill(cache)
                decode(cache, 4)
        except BaseException as error:
            errors.append(error)

    with kvtier.trace(tmp_path / "x.json"):
        threads = [threading.Thread(target=work, args=(cache,)) for cache in caches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert problems(tmp_path / "x.json") == []
    events = read_trace(tmp_path / "x.json")
    names = sorted({x.cache for x in events})
    assert len(names) == 3
    found = sorted(sums([x for x in events if x.cache == name])["up"] for name in names)
    assert found == sorted(cache.stats.bytes_up for cache in caches)


def test_where_a_file_is_full_the_rest_is_counted(tmp_path: Path) -> None:
    cache = spilled("all-fetch")
    fill(cache)
    with kvtier.trace(tmp_path / "x.json", limit=20) as trace:
        decode(cache, 4)
    assert (trace.events, len(read_trace(tmp_path / "x.json"))) == (20, 20)
    assert trace.dropped > 20
    assert json.loads((tmp_path / "x.json").read_text())["otherData"]["dropped"] == trace.dropped


class Point:
    """A point of a device's work, which it comes by when it is told to."""

    def __init__(self, at: float) -> None:
        self.at, self.there = at, False

    def seconds(self) -> float | None:
        return self.at if self.there else None

    def settle(self) -> None:
        self.there = True


def test_what_a_device_has_yet_to_do_is_not_waited_for_before_the_end(tmp_path: Path) -> None:
    from kvtier.stats import Counters

    counters, memory = Counters(), Copies()
    trace = kvtier.trace(tmp_path / "x.json")
    with trace:
        start = trace.began
        trace.step(counters, 1, start, "cuda:0", memory)
        points = [Point(start + x) for x in (1.0, 2.0, 1.25, 1.75)]
        trace.stall(counters, "cuda:0", points[2], points[3], {"layer": 0}, cuts=True)
        trace.attention(counters, 0, "cuda:0", points[0], points[1], 1)
        trace.step(counters, 1, start + 2.5, "cuda:0", memory)
        assert not any(point.there for point in points)
        assert trace.events == 0, "in order: nothing comes before what the device has yet to do"
    assert problems(tmp_path / "x.json") == []
    events = read_trace(tmp_path / "x.json")
    computed = [(x.name, round(x.start, 6), round(x.end, 6)) for x in events if x.lane == "compute"]
    assert computed[:4] == [
        ("layer 0", 0.0, 1.0),
        ("attention 0", 1.0, 1.25),
        ("attention 0", 1.75, 2.0),
        ("rest", 2.0, 2.5),
    ]
    assert memory.drained


class Copies:
    """Something with copies under way."""

    drained = False

    def drain(self) -> None:
        self.drained = True


def test_a_folder_is_no_trace_and_that_is_said_before_anything_is_recorded(tmp_path: Path) -> None:
    entered = False
    with pytest.raises(ConfigError, match="no trace at"), kvtier.trace(tmp_path):
        entered = True
    assert not entered
    assert tracing.active is None
    assert list(tmp_path.parent.glob(".*.part")) == []


@pytest.mark.parametrize("wrong", [None, 3, b"x.json"])
def test_what_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="path of a file"):
        kvtier.trace(wrong)
    with pytest.raises(ConfigError, match="limit"):
        kvtier.trace("x.json", limit="all")  # type: ignore[arg-type]


def test_a_path_that_no_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There can be no trace"), kvtier.trace(tmp_path / "a\0b"):
        pass
    assert tracing.active is None
