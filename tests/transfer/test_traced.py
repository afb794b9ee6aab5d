"""A trace of the CUDA engine: its code on a model of streams, where an event is read only once it may be; and on a
device, its times against the CPU's."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest
import torch
from conversations import STEPS, Conversation, through_tables
from stream_model import StreamModel

import kvtier
from kvtier.planning.reports.trace import busy_seconds, hidden_share, read_trace
from kvtier.stats import Counters
from kvtier.transfer import cuda
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction
from tests.planning.traces import problems


@pytest.mark.parametrize("host_attention", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_points_of_streams_are_read_when_they_may_be_and_every_copy_is_there(
    seed: int, host_attention: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_the_host: None
) -> None:
    monkeypatch.setattr(cuda, "COMPARE", 0.0)  # clocks are compared for each point
    if host_attention:
        through_tables(monkeypatch)
    with StreamModel(seed, monkeypatch) as model, torch.no_grad():
        talk = Conversation(model, seed, host_attention=host_attention)
        with kvtier.trace(tmp_path / "x.json"):
            for _ in range(STEPS):
                talk.step()
            counters = talk.cache._forward.counters
        device = talk.engine.device
        talk.cache.close()
    assert not model.races
    assert counters.bytes_up
    events = read_trace(tmp_path / "x.json")
    for lane, nbytes in (("up", counters.bytes_up), ("down", counters.bytes_down)):
        assert sum(x.args["bytes"] for x in events if x.lane == lane) == nbytes
    assert problems(tmp_path / "x.json") == []
    assert {x.device for x in events if x.lane == "compute"} == {str(device)}


def compared(engine: CudaTransfers) -> float:
    """Let an engine compare its clocks at a moment at which nothing else comes between, if there is one. Seconds by
    which they may differ."""
    found = math.inf
    for _ in range(100):
        torch.cuda.synchronize()
        engine._clock, began = None, time.perf_counter()
        engine._compared().event.synchronize()
        found = time.perf_counter() - began
        if found < 2e-4:
            break
    return found


@pytest.mark.cuda
def test_on_a_device_copies_and_computing_are_where_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda, "COMPARE", math.inf)
    device, counters = torch.device("cuda", 0), Counters()
    engine = CudaTransfers(device)
    host = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cpu").pin_memory()
    target = torch.empty_like(host, device=device)
    engine.submit([TensorCopy(host, target)], Direction.FETCH, counters).synchronize()
    slack = compared(engine) + 2e-4  # of the clocks, and as the two drift apart
    with kvtier.trace(tmp_path / "x.json") as trace:
        trace.step(counters, 1, time.perf_counter(), str(device), engine)
        times = []
        for layer in range(4):
            torch.cuda.synchronize()
            began, point = time.perf_counter(), engine.stamp()
            torch.cuda._sleep(20_000_000)
            fetch = engine.submit([TensorCopy(host, target)], Direction.FETCH, counters, behind=(), layer=layer)
            end = engine.stamp()
            trace.attention(counters, layer, str(device), point, end, 1)
            torch.cuda.synchronize()
            times.append((began, time.perf_counter()))
            fetch.wait()
            engine.poll()
    events = read_trace(tmp_path / "x.json")
    attentions = [x for x in events if x.name.startswith("attention")]
    fetches = [x for x in events if x.lane == "up"]
    assert len(attentions) == len(fetches) == 4
    for found in (attentions, fetches):
        for x, (began, ended) in zip(found, times, strict=True):
            assert began - slack <= x.start + trace.began <= x.end + trace.began <= ended + slack
    for a, b in itertools.pairwise(fetches):
        assert a.end <= b.start
    assert busy_seconds(events, "up") == pytest.approx(sum(x.seconds or 0 for x in fetches))
    share = hidden_share(events)
    assert share is not None
    assert share > 0.5, "a copy goes on while the device computes"
    engine.close()
