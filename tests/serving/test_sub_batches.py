"""Steps of two forwards that take turns: the tokens of `generate`, whatever moves meanwhile, wherever it is cut short.

KVTIER_TEST_WORKLOADS=100 plays a hundred times as many loads.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_short import steps_with_an_interrupt
from families import tiny_model
from workloads import MODELS, Load, by_generate, model_of

import kvtier
from kvtier import Engine, TieredMemory, UnsupportedError
from kvtier.attention import split
from kvtier.forward.packed import PackedForward
from kvtier.memory.blocks.block import State
from kvtier.planning.reports.trace import busy_seconds, read_trace
from kvtier.serving.runners import turns
from kvtier.serving.runners.packed import PackedRunner
from kvtier.serving.runners.sub_batches import SubBatches
from kvtier.testing import emulated_device, held, throttled, with_doubles
from kvtier.transfer import throttled as transfers

pytest.importorskip("greenlet")
TIMES = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))
#: Loads of each model.
LOADS = {"llama": 9, "gemma3": 2, "mistral_sliding": 2, "deepseek_v3": 1, "gpt2": 1, "gpt_oss": 1, "qwen3_moe": 1}


class Drawn:
    """Any rows in any of two forwards, in place of `SubBatches`."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts

    def plan(self, batch: Sequence[Any]) -> list[int]:
        chosen = list(range(len(batch)))
        if len(batch) > 1 and self.rng.random() < 0.1:
            self.counts["left"] += 1
            chosen.pop(self.rng.randrange(len(batch)))
        return chosen

    def second(self, batch: Sequence[Any]) -> set[int]:
        if len(batch) < 2 or self.rng.random() < 0.1:
            return set()
        self.counts["apart"] += 1
        return set(self.rng.sample(range(len(batch)), self.rng.randrange(1, len(batch))))

    def took(self, seconds: float) -> None:
        assert seconds >= 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Copies go on in the background, in memory whose free slots are NaN; blocks move while a call is paused. What
    happened is counted."""
    counts, rng = Counter[str](), random.Random(3)
    setup, pause, after, finish = TieredMemory._setup, turns.Turns.pause, split._after_pause, split._Parts.finish

    def with_background(self: Any, options: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
        setup(self, options, policy, held(rng.randrange(1000), late=rng.random() < 0.5), poison=True)

    def pausing(self: turns.Turns) -> None:
        pause(self)
        for _ in range(rng.randrange(4) if moving else 0):
            move(moving[-1], rng)

    def halved(parts: Any, pause: Any) -> torch.Tensor:
        counts["halves"] += 1
        paused.append(parts)
        try:
            return after(parts, pause)
        finally:
            paused.remove(parts)

    def finished(parts: Any) -> torch.Tensor:
        counts["finished"] += parts in paused  # else blocks have moved, and the call is made again
        return finish(parts)

    moving, paused = list[Any](), list[Any]()
    run = turns.Turns.run

    def running(self: turns.Turns, calls: Any, device: torch.device) -> Any:
        forward = calls[0].args[0]._step
        moving.append(forward)
        try:
            return run(self, calls, device)
        finally:
            moving.pop()

    monkeypatch.setattr(TieredMemory, "_setup", with_background)
    monkeypatch.setattr(turns.Turns, "pause", pausing)
    monkeypatch.setattr(turns.Turns, "run", running)
    monkeypatch.setattr(split, "_after_pause", halved)
    monkeypatch.setattr(split._Parts, "finish", finished)
    return counts


def move(forward: Any, rng: random.Random) -> None:
    """Let a block leave the device, or bring one."""
    reader = rng.choice(list(forward.readers.values()))
    device, blocks = reader.device, reader.layer.blocks
    if device.slabs is None:
        return
    with forward.memory.lock, forward.memory.change:
        if rng.random() < 0.5:
            full = [run for run in blocks.runs if run.state is State.BOTH]
            if full:
                device.evict_run(rng.choice(full))
        else:
            away = [run for run in blocks.runs if run.state is State.HOST]
            device.fetch(away, 1, blocks, evict=False)


class Apart(Load):
    """A load whose steps are computed by two forwards wherever they can."""

    def engine(self) -> Engine:
        engine = super().engine()
        if isinstance(engine._runner, PackedRunner):
            engine._runner.sub_batches = Drawn(self.random, self.seen)  # type: ignore[assignment]
        return engine

    seen: Counter[str]


def test_every_request_gets_the_tokens_of_generate(counts: Counter[str]) -> None:
    for more in range(8):  # whether a call has to be made again depends on the order of threads too
        for name, loads in LOADS.items():
            for seed in range(loads * TIMES * more, loads * TIMES * (more + 1)):
                load = Apart(name, seed)
                load.seen = counts
                load.play()
        if counts["halves"] > counts["finished"]:
            break
    print(dict(counts))
    assert counts["apart"] > 50
    assert counts["left"]
    assert counts["halves"] > counts["finished"] > 0, "no call had a part on the host, or none was made again"


def engine_apart(name: str, rng: random.Random, counts: Counter[str]) -> Engine:
    engine = Engine(tiny_model(name), host_budget="100MB", device_budget=60000, block_size=4, max_batch_tokens=40)
    engine._runner.sub_batches = Drawn(rng, counts)  # type: ignore[attr-defined]
    return engine


def some(rng: random.Random) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(1, 128) for _ in range(rng.choice((1, 9, 20, 40)))) for _ in range(5)]


class Halves(Drawn):
    """Two forwards, each over half of the rows, wherever there are two."""

    def plan(self, batch: Sequence[Any]) -> list[int]:
        return list(range(len(batch)))

    def second(self, batch: Sequence[Any]) -> set[int]:
        return set(range(len(batch) // 2))


def answer_in_halves(counts: Counter[str]) -> None:
    """Some requests, most of whose blocks are on the host, by two forwards in every step."""
    rng = random.Random(5)
    engine = engine_apart("llama", rng, counts)
    engine._runner.sub_batches = Halves(rng, counts)  # type: ignore[attr-defined]
    prompts = [tuple(rng.randrange(1, 128) for _ in range(40)) for _ in range(4)]
    names = [engine.add_request(list(p), max_new_tokens=8, do_sample=False) for p in prompts]
    while engine.step():
        pass
    for prompt, request in zip(prompts, names, strict=True):
        assert engine.output(request).generated_tokens == by_generate("llama", prompt, 8)[0]
    engine.close()


def test_what_a_paused_call_has_sent_to_the_host_stays_its_own(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, init, alive = split._Parts.finish, split._Parts.__init__, list[Any]()

    def begins(self: Any, *args: Any) -> None:
        init(self, *args)
        alive.append(self)
        counts["at once"] = max(counts["at once"], len(alive))

    def finishes(self: Any) -> torch.Tensor:
        if self._host is not None:
            self._host._down.synchronize()
        assert self._host is None or torch.equal(self._host._buffer.query, self.call.query), (
            "another call's query is in its buffer"
        )
        return finish(self)

    def ends(self: Any) -> None:
        if self in alive:
            alive.remove(self)
        end(self)

    end = split._Parts.end
    for name, new in (("__init__", begins), ("finish", finishes), ("end", ends)):
        monkeypatch.setattr(split._Parts, name, new)
    answer_in_halves(counts)
    assert counts["at once"] == 2
    assert counts["finished"] > 20


def test_what_is_due_behind_a_layer_waits_until_both_have_attended_to_it(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, due = PackedForward._advance, Counter[int]()

    def advancing(self: PackedForward, reader: Any) -> None:
        assert all(reader.layer.index in each.attended for each in self.under_way)
        due[len(self.under_way)] += 1
        advance(self, reader)

    monkeypatch.setattr(PackedForward, "_advance", advancing)
    answer_in_halves(counts)
    layers = tiny_model("llama").config.num_hidden_layers
    assert due[2] > 0
    assert due[2] % layers == 0, "once for each layer of a step"


@pytest.mark.parametrize("seed", range(8 * TIMES))
def test_after_an_interrupt_at_any_line_every_request_has_its_tokens(seed: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    name, left = rng.choice(("llama", "gemma3")), rng.randrange(20000, 60000)
    prompts, engine = some(rng), engine_apart(name, rng, counts)
    names = [engine.add_request(list(p), max_new_tokens=8, do_sample=False) for p in prompts]

    steps_with_an_interrupt(engine, names, left)
    assert torch.is_grad_enabled()
    for prompt, request in zip(prompts, names, strict=True):
        assert engine.output(request).generated_tokens == by_generate(name, prompt, 8)[0]
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("seed", range(6 * TIMES))
def test_a_forward_of_two_that_raises_costs_no_other_request_its_tokens(seed: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    prompts, model = some(rng), tiny_model("llama")
    engine = engine_apart("llama", rng, counts)
    raising, count = {rng.randrange(3, 80) for _ in range(3)}, 0

    def hook(module: torch.nn.Module, args: Any) -> None:
        nonlocal count
        count += 1
        if count in raising:
            raise RuntimeError("a forward fails")

    handles = [m.register_forward_pre_hook(hook) for m in model.modules() if type(m).__name__.endswith("MLP")]
    try:
        names = [engine.add_request(list(p), max_new_tokens=8, do_sample=False) for p in prompts]
        while engine.step():
            pass
    finally:
        for handle in handles:
            handle.remove()
    for prompt, request in zip(prompts, names, strict=True):
        output = engine.output(request)
        assert output.error is not None or output.generated_tokens == by_generate("llama", prompt, 8)[0]
    assert sum(engine.output(each).error is not None for each in names) <= len(raising)
    engine.check_integrity()
    engine.close()


def emulated(model: Any, machine: Any, **options: Any) -> tuple[Engine, TieredMemory]:
    memory = TieredMemory(device_budget="100KB", host_budget="64MiB", audit="off")
    with_doubles(memory, machine)
    return Engine(model, memory=memory, block_size=4, **options), memory


def test_an_engine_learns_when_two_forwards_are_quicker(caplog: pytest.LogCaptureFixture) -> None:
    """A host so slow that its attention takes longer than a layer: it hides behind the other forward's layers."""
    model, machine = model_of("llama"), throttled(1e9, host=2e6)
    engine, memory = emulated(model, machine)
    assert engine.sub_batches
    prompts = [tuple(random.Random(i).randrange(1, 120) for _ in range(60)) for i in range(6)]
    with emulated_device(model, machine, linear=2e-3, device_rate=1e9):
        names = [engine.add_request(list(p), max_new_tokens=18, do_sample=False) for p in prompts]
        seen = set()
        while engine.step():
            choice = engine._runner.sub_batches.choice  # type: ignore[attr-defined]
            seen.add("" if choice is None else choice.name)
    assert "sub-batches" in seen
    for prompt, name in zip(prompts, names, strict=True):
        assert engine.output(name).generated_tokens == by_generate("llama", prompt)[0]
    engine.close()
    memory.close()


def test_a_forward_waits_for_nothing_between_its_work_for_the_device_and_its_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what one computes hides nothing that the host does for the other: each would see its own layer out."""
    model, machine = model_of("llama"), throttled(1e9, host=2e6)
    engine, memory = emulated(model, machine, sub_batches=False)
    runner: Any = engine._runner
    runner.sub_batches = Halves(random.Random(0), Counter())
    happened, here = [], threading.get_ident()

    def note(owner: Any, name: str, what: str) -> None:
        before = getattr(owner, name)

        def noted(*args: Any) -> Any:
            if threading.get_ident() == here:
                happened.append(what)
            return before(*args)

        monkeypatch.setattr(owner, name, noted)

    note(transfers, "sleep_until", "waits")
    note(transfers.DeviceClock, "run", "computes")
    note(turns.Turns, "pause", "pauses")
    with emulated_device(model, machine, linear=2e-3, device_rate=1e9):
        for i in range(6):
            prompt = [random.Random(i).randrange(1, 120) for _ in range(60)]
            engine.add_request(prompt, max_new_tokens=8, do_sample=False)
        while engine.step():
            pass
    engine.close()
    memory.close()
    *pieces, _ = " ".join(happened).split("pauses")
    worked = [piece.rpartition("computes") for piece in pieces if "computes" in piece]
    assert len(worked) > 40
    assert "waits" in " ".join(before for before, _, _ in worked), "no part of it was on the host"
    assert [after.strip() for _, _, after in worked if after.strip()] == []


def test_what_is_in_the_way_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with caplog.at_level(logging.DEBUG, "kvtier.serving"):
        engine = Engine(model, host_budget="64MiB")
    assert not engine.sub_batches
    (said,) = (x for x in caplog.records if x.name == "kvtier.serving" and "take turns" in x.message)
    assert said.message == "Forwards do not take turns: no device computes behind the CPU's back."
    assert said.levelno == logging.DEBUG, "that is how it is on a CPU, and no news to whoever serves there"
    engine.close()
    with pytest.raises(UnsupportedError, match="no device computes"):
        Engine(model, host_budget="64MiB", sub_batches=True)
    with pytest.raises(kvtier.ConfigError, match="sub_batches="):
        Engine(model, host_budget="64MiB", sub_batches="yes")  # type: ignore[arg-type]
    machine = throttled(1e9)
    for name, reason in (("host_attention", "host_attention is off"), ("greenlet", "not installed")):
        if name == "greenlet":
            monkeypatch.setitem(sys.modules, "greenlet", None)
        with pytest.raises(UnsupportedError, match=reason):
            emulated(model, machine, sub_batches=True, host_attention=name != "host_attention")
    assert MODELS["falcon"][3] == "single"
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="run single"):
        Engine(model_of("falcon"), host_budget="64MiB", sub_batches=True)


def test_a_model_whose_weights_are_offloaded_takes_no_turns() -> None:
    class Hook:
        offload = True

    model = tiny_model("llama")
    engine, memory = emulated(model, throttled(1e9), sub_batches=False)
    assert not engine.sub_batches
    from kvtier.serving.runners import sub_batches

    assert sub_batches.why_not(model, memory, True) == ""
    layer = model.model.layers[0]
    layer._hf_hook = Hook()
    try:
        assert "offloads" in sub_batches.why_not(model, memory, True)
    finally:
        del layer._hf_hook
    engine.close()
    memory.close()
    assert SubBatches  # the decider of `Engine(sub_batches=True)`


@pytest.mark.parametrize("apart", [False, True])
def test_a_trace_tells_computing_from_waiting_for_the_host(apart: bool, tmp_path: Path) -> None:
    """On a device that computes for 4 ms a layer and forward, with a host whose attention takes longer."""
    model, machine = model_of("llama"), throttled(1e9, host=2e6)
    engine, memory = emulated(model, machine, sub_batches=False)
    runner: Any = engine._runner
    if apart:
        runner.sub_batches = Halves(random.Random(0), Counter())
    prompts = [tuple(random.Random(i).randrange(1, 120) for _ in range(60)) for i in range(6)]
    with emulated_device(model, machine, linear=4e-3, device_rate=1e9):
        for prompt in prompts:
            engine.add_request(list(prompt), max_new_tokens=8, do_sample=False)
        for _ in range(3):
            engine.step()
        before, steps = runner.forward.counters.host_seconds, 0
        with kvtier.trace(tmp_path / "x.json"):
            while engine.step():
                steps += 1
        hosted = runner.forward.counters.host_seconds - before
    engine.close()
    memory.close()
    events = read_trace(tmp_path / "x.json")
    pieces = sorted((x.start, x.end) for x in events if x.lane in ("compute", "wait"))
    assert all(b[0] - a[1] > -1e-6 for a, b in itertools.pairwise(pieces)), "it computes and waits at once"
    computed, waited = (busy_seconds(events, lane) for lane in ("compute", "wait"))
    print(f"{apart=} {steps=} {computed=:.4f} {waited=:.4f} {hosted=:.4f}")
    assert computed > 0.9 * 4e-3 * model.config.num_hidden_layers * (2 if apart else 1) * steps
    # In one forward the device has little else to do; of two one computes while the host attends for the other.
    assert waited > 0.3 * hosted
    assert not apart or waited < hosted - 4e-3 * model.config.num_hidden_layers * (steps - 1)
