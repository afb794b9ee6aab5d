"""Who waits for a request hears of it, whoever runs the steps, and waits as long as was said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria
from workloads import by_generate, model_of

from kvtier import ConfigError, Engine
from kvtier.serving import engine as engine_module
from kvtier.serving.batch import Batch
from kvtier.serving.steps import loop
from kvtier.serving.steps.step import StepRunner

LONG = 120.0
PROMPT = (5, 6, 7)
#: Ways to wait for so many tokens behind the prompt; each gives them.
WAYS: dict[str, Callable[[Engine, int], list[int]]] = {
    "stream": lambda engine, count: list(engine.stream(added(engine, count))),
    "wait": lambda engine, count: engine.wait(added(engine, count)).generated_tokens,
    "generate_batch": lambda engine, count: (
        (
            next(iter(engine.generate_batch([list(PROMPT)], max_new_tokens=count, do_sample=False).values()))
        ).generated_tokens
    ),
}


def added(engine: Engine, count: int) -> str:
    return engine.add_request(list(PROMPT), max_new_tokens=count, do_sample=False)


def engine_of(**options: Any) -> Engine:
    return Engine(model_of("llama"), host_budget="8MiB", block_size=4, **options)


def held_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Forwards wait for the second event, and set the first one when they begin to."""
    at, go_on, step = threading.Event(), threading.Event(), engine._runner.step

    def waits(work: Any) -> Any:
        at.set()
        assert go_on.wait(LONG)
        return step(work)

    monkeypatch.setattr(engine._runner, "step", waits)
    return at, go_on


class Asks(threading.Thread):
    """Calls something, and has what it gave or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.gave: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.gave = self._call()
        except BaseException as error:
            self.gave = error

    def end(self) -> Any:
        self.join(LONG)
        assert not self.is_alive()
        return self.gave


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_who_waits_while_another_one_steps_goes_on_when_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, way: str, closed: bool
) -> None:
    engine = engine_of()
    at, go_on = held_steps(engine, monkeypatch)
    steps = Asks(lambda: WAYS["stream"](engine, 2))
    assert at.wait(LONG)
    waits, wait = threading.Event(), engine._requests.lock.wait

    def told(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    monkeypatch.setattr(engine._requests.lock, "wait", told)
    asks = Asks(lambda: WAYS[way](engine, 6))
    while asks.is_alive() and not waits.wait(0.01):
        pass
    closes = Asks(engine.close) if closed else None
    go_on.set()
    found = [steps.end(), asks.end()]
    tokens = by_generate("llama", PROMPT, 6)[0]
    if closes is None:
        assert found == [tokens[:2], tokens]
    else:
        assert closes.end() is None
        assert [x == tokens[: len(x)] for x in found] == [True, True]
    engine.close()


@pytest.mark.parametrize("started", [False, True])
def test_who_waits_for_an_end_waits_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    now, asked, over = [0.0], threading.Event(), threading.Event()
    engine = engine_of()
    step = engine._runner.step

    def clock() -> float:
        if isinstance(threading.current_thread(), Asks):
            asked.set()
        return now[0]

    def takes_two_seconds(work: Any) -> Any:
        assert asked.wait(LONG)  # its five seconds begin at 0
        now[0] += 2
        assert now[0] <= 6 or over.wait(LONG)
        return step(work)

    for module in (engine_module, loop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock), raising=False)
    monkeypatch.setattr(engine._runner, "step", takes_two_seconds)
    name = added(engine, 10)
    if started:
        engine.start()
    asks = Asks(lambda: engine.wait(name, timeout=5))
    asks.join(LONG)
    assert not asks.is_alive(), "it waits for more"
    over.set()
    assert isinstance(asks.end(), TimeoutError)
    assert engine.wait(name).generated_tokens == by_generate("llama", PROMPT, 10)[0]
    engine.close()


def test_what_is_done_between_two_tokens_of_a_stream_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in (engine_module, loop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)
    engine, found = engine_of(), list[int]()
    for token in engine.stream(added(engine, 6), timeout=5):
        found.append(token)
        now[0] += 100
    assert found == by_generate("llama", PROMPT, 6)[0]
    engine.close()


@pytest.mark.parametrize("started", [False, True])
def test_a_batch_draws_alike_however_often_its_queue_was_full(started: bool) -> None:
    drawn = []
    for waiting in (100, 2):
        engine = engine_of(max_waiting=waiting, max_running=2)
        if started:
            engine.start()
        torch.manual_seed(3)
        outputs = engine.generate_batch([[5, 6, i] for i in range(6)], max_new_tokens=5, do_sample=True)
        drawn.append([each.generated_tokens for each in outputs.values()])
        engine.close()
    assert drawn[0] == drawn[1]


def test_an_engine_that_is_started_while_its_thread_ends_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    at, go_on = held_steps(engine, monkeypatch)
    name = added(engine, 4)
    engine.start()
    assert at.wait(LONG)
    stops = Asks(engine.stop)
    while not engine._loop._stopping:
        time.sleep(0.01)
    starts = Asks(engine.start)
    starts.join(0.1)  # it would return at once
    go_on.set()
    assert (stops.end(), starts.end()) == (None, None)
    assert engine.alive
    assert engine.wait(name).generated_tokens == by_generate("llama", PROMPT, 4)[0]
    engine.close()


def test_a_thread_that_is_started_as_the_one_before_has_ended_is_not_lost() -> None:
    engine = engine_of()
    engine.start()
    thread = engine._loop._thread
    assert thread is not None
    join = thread.join

    def starts_another(timeout: float | None = None) -> None:
        join(timeout)
        engine.start()

    thread.join = starts_another  # type: ignore[method-assign]
    engine.stop()
    assert engine.alive
    engine.close()
    assert not any(each.name == "kvtier-engine" for each in threading.enumerate())


def test_a_batch_whose_last_request_has_just_ended_waits_for_nothing() -> None:
    """The engine's thread may end it between two looks."""
    engine = engine_of()
    name = added(engine, 2)
    request = engine._requests.named[name]
    engine.wait(name)
    batch = Batch(engine._requests, engine._loop, SimpleNamespace, SimpleNamespace)  # type: ignore[arg-type]
    batch.added = [request]
    thread = threading.Thread(target=batch._go_on, args=(0,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    engine.close()


def test_where_processes_share_a_model_nothing_ends_by_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would end it at another step, and wait for the others for ever."""
    engine = engine_of()
    monkeypatch.setattr(StepRunner, "divided", True)
    with pytest.raises(ConfigError, match="max_time: the model is divided"):
        engine.add_request(list(PROMPT), max_new_tokens=4, max_time=100.0)
    with pytest.raises(ConfigError, match="max_time: the model is divided"):
        engine.add_request(list(PROMPT), max_new_tokens=4, stopping_criteria=[MaxTimeCriteria(100.0)])
    name = added(engine, 2)
    with pytest.raises(ConfigError, match="timeout=60: the model is divided"):
        engine.wait(name, timeout=60)
    with pytest.raises(ConfigError, match="timeout=60: the model is divided"):
        next(engine.stream(name, timeout=60))
    assert len(engine.wait(name).generated_tokens) == 2
    engine.close()
