"""The model of streams keeps CUDA's rules, and sees every byte that an operation touches."""

from __future__ import annotations

import random

import pytest
import torch
from accesses import spans_of
from stream_model import StreamModel

Patch = pytest.MonkeyPatch


def test_an_event_stands_for_what_was_done_when_it_was_recorded(monkeypatch: Patch) -> None:
    with StreamModel(0, monkeypatch, strict=False) as model:
        buffer = torch.empty(8)
        one, other = torch.cuda.Stream(None), torch.cuda.Stream(None)  # type: ignore[arg-type]
        event = torch.cuda.Event()
        other.wait_event(event)  # not recorded yet: no wait
        with torch.cuda.stream(one):
            buffer[:4].fill_(1)
            event.record(one)
            buffer[4:].fill_(1)
        other.wait_event(event)
        event.record(other)  # does not change what `other` waits for
        with torch.cuda.stream(other):
            buffer[:4].sum()
            assert not model.races
            buffer[3:5].sum()
        assert model.pairs == {("stream 1 writes", "stream 2 reads")}


def test_the_cpu_knows_what_it_waited_for_and_streams_know_what_it_knows(monkeypatch: Patch) -> None:
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        buffer = torch.empty(8)
        model.watch(buffer, "host buffer")
        one, other = torch.cuda.Stream(None), torch.cuda.Stream(None)  # type: ignore[arg-type]
        event = torch.cuda.Event()
        with torch.cuda.stream(one):
            buffer.fill_(1)
            event.record(one)
        assert not event.query()
        buffer.sum()
        assert model.pairs == {("stream 1 writes", "host reads")}
        model.races.clear()
        event.synchronize()
        assert event.query()
        buffer.sum()
        with torch.cuda.stream(other):
            buffer.fill_(2)
        assert not model.races


@pytest.mark.parametrize("seed", range(20))
def test_the_spans_of_a_tensor_are_its_bytes(seed: int) -> None:
    rng = random.Random(seed)
    whole = torch.zeros(3, 4, 5, 6, dtype=torch.int32)
    view = whole.permute(rng.sample(range(4), 4))
    for dim in range(4):
        start = rng.randrange(view.shape[dim])
        view = view.narrow(dim, start, rng.randint(1, view.shape[dim] - start))
    if rng.random() < 0.5:
        view = view[..., :: rng.randint(1, 3)]
    view.fill_(-1)
    begin, written = whole.data_ptr(), torch.zeros(whole.nbytes, dtype=torch.bool)
    for low, high in spans_of(view):
        assert not written[low - begin : high - begin].any()
        written[low - begin : high - begin] = True
    assert torch.equal(written, whole.view(torch.uint8).flatten() != 0)
