"""Of a request whose store saves, the price of preemption counts the disk: what is there, and what loads took. A disk
that is slow stops nobody."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_model

from kvtier import ConversationStore, Engine
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.names import MOST_IDLE
from kvtier.serving.request import Request

PROMPT = list(range(1, 70))


def computed(engine: Engine, prompt: list[int]) -> Request:
    """A request that runs and has its prompt."""
    name = engine.add_request(prompt, max_new_tokens=5, do_sample=False)
    request = engine._requests.named[name]
    while not request.output.generated_tokens:
        engine.step()
    return request


def test_a_saved_prompt_is_priced_by_what_loads_took(tmp_path: Path) -> None:
    model = build_model("llama", "sdpa")
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        engine = Engine(model, store=store)
        assert math.isinf(engine._costs.prices().load), "nothing was loaded yet"
        request = computed(engine, PROMPT)
        assert request.job.saved == len(PROMPT)
        while engine.step():
            pass
        engine.close()
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4, loading="always") as store:
        engine = Engine(model, store=store)
        again = computed(engine, [*PROMPT, 5, 6, 7])
        assert again.output.cached_tokens >= len(PROMPT), "it was loaded"
        prices = engine._costs.prices()
        assert prices.load_fixed + prices.load > 0
        assert math.isfinite(prices.load)
        assert math.isfinite(prices.from_disk(again.job.saved))
        secret = engine.add_request(PROMPT, max_new_tokens=5, do_sample=False, salt=object())
        job = engine._requests.named[secret].job
        while engine.step():
            pass
        assert job.saved == 0, "nobody could find it on the disk"
        engine.close()


def test_without_a_disk_nothing_is_saved() -> None:
    engine = Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4)
    request = computed(engine, PROMPT)
    assert request.job.saved == 0
    assert math.isinf(engine._costs.prices().load)
    engine.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """From when the first event is set, no conversation is saved until the second one is."""
    saves, is_slow, go_on = Disk.save_conversation, threading.Event(), threading.Event()

    def save(self: Disk, *args: Any) -> bool:
        assert not is_slow.is_set() or go_on.wait(180)
        return saves(self, *args)

    monkeypatch.setattr(Disk, "save_conversation", save)
    yield is_slow, go_on
    go_on.set()


def test_a_turn_that_a_slow_disk_saves_stops_no_other_request(
    tmp_path: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    model, options = build_model("llama", "sdpa"), {"max_new_tokens": 12, "do_sample": False}
    right = model.generate(torch.tensor([PROMPT]), **options)[0].tolist()
    (is_slow, go_on), names = slow, ["alice", "bob"]
    is_slow.set()
    with (
        ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store,
        Engine(model, store=store) as engine,
    ):
        try:
            for name in names:
                turn = engine.add_request(PROMPT, conversation=name, **options)
                assert engine.wait(turn, timeout=60).finish_reason == "length"
                assert store.open(name).ids == right
            other = engine.add_request(PROMPT[::-1], **options)
            assert len(list(engine.stream(other, timeout=60))) == 12
        finally:
            go_on.set()
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        assert [store.open(name).ids for name in names] == [right, right]


@pytest.mark.parametrize("what", ["read", "put away"])
def test_a_conversation_that_comes_from_a_slow_disk_or_goes_there_stops_no_other_request(
    what: str, tmp_path: Path, slow: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = build_model("llama", "sdpa"), {"max_new_tokens": 12, "do_sample": False}
    (is_slow, go_on), at, reads, saves = slow, threading.Event(), Disk.conversation, Disk.save_conversation
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        for i in range(MOST_IDLE + 1):
            store.open(f"{i}").went_on([i])
        store.flush()
        if what == "read":
            monkeypatch.setattr(Disk, "conversation", lambda *args: at.set() or (go_on.wait(180) and reads(*args)))
        else:
            monkeypatch.setattr(Disk, "save_conversation", lambda *args: at.set() or saves(*args))
            is_slow.set()
            store.open("one too many").went_on([1])
        with Engine(model, store=store) as engine:
            turns = list[str]()
            adds = threading.Thread(
                target=lambda: turns.append(engine.add_request(PROMPT, conversation="0", **options))
            )
            adds.start()
            try:
                assert at.wait(60)
                other = engine.add_request(PROMPT[::-1], **options)
                assert len(list(engine.stream(other, timeout=60))) == 12
            finally:
                go_on.set()
            adds.join(120)
            assert engine.wait(turns[0], timeout=60).finish_reason == "length"


@pytest.mark.parametrize("when", ["forgotten", "gone on"])
def test_what_a_conversation_is_when_it_is_saved_counts(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten, or goes on, while the disk saves another one."""
    model, ticket = build_model("llama", "sdpa"), threading.Semaphore(1)
    saves = Disk.save_conversation

    def is_slow(self: Disk, *args: Any) -> bool:
        assert ticket.acquire(timeout=120)
        return saves(self, *args)

    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        first, second = store.open("first"), store.open("second")
        monkeypatch.setattr(Disk, "save_conversation", is_slow)
        ticket.acquire()
        first.went_on([1])
        second.went_on([2])
        if when == "forgotten":
            ticket.release(5)
            second.close()
        else:
            second.went_on([2, 3])
            ticket.release(5)
        store.flush()
        monkeypatch.undo()
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        assert store.names == ["first"] if when == "forgotten" else ["first", "second"]
        assert when == "forgotten" or store.open("second").ids == [2, 3]


def test_no_process_ends_before_a_turn_is_saved(tmp_path: Path, slow: tuple[threading.Event, threading.Event]) -> None:
    is_slow, go_on = slow
    model = build_model("llama", "sdpa")
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        is_slow.set()
        for name in ("alice", "bob"):
            store.open(name).went_on([1, 2, 3])
        (saving,) = [each for each in threading.enumerate() if each.name == "kvtier-turns"]
        assert not saving.daemon, "Python waits for its end"
        go_on.set()
        saving.join(120)
        assert store._disk_tier is not None
        assert store._disk_tier.disk.names().keys() == {"alice", "bob"}
        assert not saving.is_alive()
