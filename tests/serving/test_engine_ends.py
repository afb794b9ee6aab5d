"""Every request ends for whoever waits for it, and a closed engine has nothing any more, whatever comes between.

KVTIER_TEST_WORKLOADS=100 tries every line, and not one of many.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import forks
import pytest
from cut_short import interrupted, steps_with_an_interrupt
from families import build_model
from workloads import by_generate, model_of

from kvtier import ConfigError, ConversationStore, Engine, TieredMemory
from kvtier.serving.request import RequestOutput
from kvtier.serving.steps import loop

TIMES = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [(5, 6, 7), tuple(range(9, 40))]


class Panic(BaseException):
    """No `Exception`."""


def add(engine: Engine, **options: Any) -> list[str]:
    return [engine.add_request(list(p), max_new_tokens=6, do_sample=False, **options) for p in PROMPTS]


FORGOTTEN = """
import sys, threading, time
from transformers import AutoModelForCausalLM
from kvtier import Engine

engine = Engine(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), host_budget="8MiB")
names = [engine.add_request([5, 6, 7 + n], max_new_tokens=900, do_sample=False) for n in range(8)]
{more}
raise ValueError("a fault of the caller's")
"""
STREAMS = "engine.start(); next(engine.stream(names[0]))"
WAITS = f"{STREAMS}; threading.Thread(target=engine.wait, args=names[1:2], daemon=True).start()"
STEPS = """
def compute():
    while engine.step():
        pass

threading.Thread(target=compute, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("more", [STREAMS, WAITS, STEPS], ids=["streams", "waits", "steps"])
def test_a_process_ends_in_the_middle_of_a_step_of_an_engine_that_was_not_closed(tmp_path: Path, more: str) -> None:
    build_model("llama", "sdpa").save_pretrained(tmp_path)
    script = FORGOTTEN.replace("{more}", more)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1, run.stderr
    assert run.stderr.rstrip().endswith("ValueError: a fault of the caller's"), run.stderr


LATE = """
import atexit, sys, threading

@atexit.register  # it runs behind what kvtier registers
def late():
    engine.start()
    print(len(engine.wait(name).generated_tokens), [x.name for x in threading.enumerate() if "kvtier" in x.name])

from transformers import AutoModelForCausalLM
from kvtier import Engine

engine = Engine(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), host_budget="8MiB")
engine.start()
name = engine.add_request([5, 6, 7], max_new_tokens=40, do_sample=False)
"""


def test_at_the_end_of_a_process_who_waits_computes(tmp_path: Path) -> None:
    build_model("llama", "sdpa").save_pretrained(tmp_path)
    run = forks.run(LATE, str(tmp_path), cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "40 []\n"), run.stderr


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), True])
def test_a_time_to_wait_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    with Engine(model_of("llama"), host_budget="8MiB", block_size=4) as engine:
        name = add(engine)[0]
        for ask in (engine.wait, lambda *args: list(engine.stream(*args))):
            with pytest.raises(ConfigError, match=r"timeout=.* finite number of seconds"):
                ask(name, timeout)
        assert engine.wait(name, 60).generated_tokens == by_generate("llama", PROMPTS[0], 6)[0]


def test_when_the_thread_ends_every_listener_hears_of_it_whatever_another_one_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, added, ended = list[str](), threading.Event(), threading.Event()

    def hears(output: RequestOutput) -> None:
        assert all(each.done.is_set() for each in requests), "one is told before another has ended"
        heard.append(output.request_id)
        raise Panic

    def panics(work: object) -> None:
        added.wait(60)
        raise Panic

    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    with Engine(model_of("llama"), host_budget="8MiB") as engine:
        engine._runner.step = panics  # type: ignore[assignment, method-assign]
        names = add(engine, listener=hears)
        requests = [engine._requests.named[name] for name in names]
        added.set()
        assert ended.wait(60)
        assert heard == names
        assert all(isinstance(each.output.error, Panic) for each in requests)


def test_a_step_of_the_thread_that_fails_leaves_nothing_and_the_next_one_goes_on() -> None:
    with Engine(model_of("llama"), host_budget="8MiB", block_size=4) as engine:
        observe, fails = engine._costs.observe, [True]

        def raises(*args: Any) -> None:
            if fails and engine._steps.count == 2:
                fails.pop()
                raise RuntimeError("as told")
            observe(*args)

        engine._costs.observe = raises  # type: ignore[method-assign]
        for each in (engine.wait(name, timeout=60) for name in add(engine)):
            assert isinstance(each.error, RuntimeError)
        with engine._loop.stepping:  # it is repaired
            assert not engine._requests.books.interrupted
            assert not engine._runner.forward.sequences  # type: ignore[attr-defined]
        for prompt, name in zip(PROMPTS, add(engine), strict=True):
            assert engine.wait(name, timeout=60).generated_tokens == by_generate("llama", prompt, 6)[0]
        engine.stop()
        engine.check_integrity()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("within", "stride"), [("", 211), ("forward/packed.py", 5)])
def test_an_engine_that_was_interrupted_at_any_line_of_a_step_is_closed(within: str, stride: int, stored: bool) -> None:
    left, came = 1, True
    while came:
        model = model_of("llama")
        attention = model.config._attn_implementation
        memory = TieredMemory(host_budget="8MiB")
        store = ConversationStore(model, memory=memory, block_size=4) if stored else None
        engine = Engine(model, store=store) if stored else Engine(model, memory=memory, block_size=4)
        names = add(engine)
        engine.step()
        came = steps_with_an_interrupt(engine, names, left, within, steps=1)
        engine.close()
        assert engine.closed
        assert {engine.output(name).finish_reason for name in names} <= {"cancelled", "length"}
        if store is not None:
            assert not any(entry.sequence.users for entry in store._kept.entries.values())
            store.close()
        memory.close()  # raises where somebody has not left
        assert model.config._attn_implementation == attention
        left += max(stride // TIMES, 1)


def test_a_close_that_is_interrupted_at_any_line_is_done_by_another_one() -> None:
    left, came = 1, True
    while came:
        model = model_of("llama")
        attention = model.config._attn_implementation
        engine = Engine(model, host_budget="8MiB", block_size=4)
        names = add(engine)
        engine.step()
        came = not interrupted(engine.close, left)
        engine.close()
        assert engine.closed
        assert engine.memory.closed
        assert {engine.output(name).finish_reason for name in names} == {"cancelled"}
        assert model.config._attn_implementation == attention
        left += max(199 // TIMES, 1)


@pytest.mark.parametrize("busy", [False, True])
def test_a_thread_that_is_started_while_an_engine_is_closed_ends_and_leaves_nothing(
    busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    memory = TieredMemory(host_budget="8MiB")
    engine = Engine(model_of("llama"), memory=memory, block_size=4)
    engine.start()
    stop = engine.stop

    def stops_before_another_starts() -> None:
        engine.stop = stop  # type: ignore[method-assign]
        stop()
        with engine._loop.stepping:  # as whoever asks for a step: the new thread waits for it
            names.extend(add(engine) if busy else [])
            starts = threading.Thread(target=engine.start)
            starts.start()
            starts.join(60)

    names = list[str]()
    engine.stop = stops_before_another_starts  # type: ignore[method-assign]
    engine.close()
    assert not engine.alive
    assert {engine.output(name).finish_reason for name in names} <= {"cancelled", "length"}
    assert not caplog.records
    memory.close()  # raises where somebody has not left


def test_a_batch_that_is_cut_short_leaves_no_request_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Condition.wait

    def interrupts(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(condition, timeout)

    with Engine(model_of("llama"), host_budget="8MiB", block_size=4) as engine:
        engine.start()
        monkeypatch.setattr(threading.Condition, "wait", interrupts)
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch([list(p) for p in PROMPTS], max_new_tokens=60, do_sample=False)
        monkeypatch.undo()
        (found,) = engine.generate_batch([list(PROMPTS[1])], max_new_tokens=6, do_sample=False).values()
        assert found.generated_tokens == by_generate("llama", PROMPTS[1], 6)[0]
        assert [x.finish_reason for x in engine._requests.ended.values()] == ["cancelled", "cancelled", "length"]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_engine_that_is_dropped_gives_the_models_attention_back(
    monkeypatch: pytest.MonkeyPatch, started: bool, stored: bool
) -> None:
    monkeypatch.setattr(loop, "_LOOK", 0.01)
    model, ended = model_of("llama"), threading.Event()
    attention = model.config._attn_implementation
    store = ConversationStore(model, host_budget="8MiB") if stored else None
    engine = Engine(model, store=store) if stored else Engine(model, host_budget="8MiB")
    other = Engine(model, host_budget="8MiB")
    thread = None
    if started:
        engine.start()
        thread = engine._loop._thread
    heard = list[str]()

    def hears(output: RequestOutput) -> None:
        if output.is_finished():
            heard.append(output.finish_reason)
            ended.set()

    add(engine, listener=hears)
    del engine
    if thread is not None:
        assert ended.wait(60), "its thread computes what was asked"
        thread.join(60)
        assert not thread.is_alive()
        assert heard == ["length"] * 2
    gc.collect()
    assert model.config._attn_implementation == "kvtier", "another engine runs it"
    other.close()
    assert model.config._attn_implementation == attention
    if store is not None:
        store.close()


def test_an_engine_that_its_model_knows_is_dropped_with_it() -> None:
    model = build_model("llama", "sdpa")
    model.engine = Engine(model, host_budget="8MiB")
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None
