"""Forwards that raise and interrupts at any line: no wrong token, nothing lost, and the engine goes on.

KVTIER_TEST_WORKLOADS=100 tries a hundred times as many.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_short import steps_with_an_interrupt
from families import build_model, tiny_model
from workloads import _bytes_of_a_block, by_generate, model_of

import kvtier
from kvtier import BudgetError, ConfigError, ConversationStore, Engine, MismatchError, QueueFullError, TieredMemory
from kvtier.serving.requests import MAX_ENDED

TIMES = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))
MODELS = ("llama", "gemma3", "qwen3_next", "deepseek_v3", "falcon")
NEW = 8
#: Tiny requests whose memory does not add up.
MANY = int(os.environ.get("KVTIER_TEST_REQUESTS", "20000"))


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def some(rng: random.Random, count: int = 6) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(1, 128) for _ in range(rng.choice((1, 9, 20, 70)))) for _ in range(count)]


def engine_of(name: str, rng: random.Random) -> Engine:
    return Engine(
        tiny_model(name),
        host_budget="100MB",
        device_budget=rng.choice((None, 60000)),
        block_size=rng.choice((4, 16)),
        max_batch_tokens=rng.choice((8, 40)),
    )


def check(engine: Engine, name: str, prompts: list[tuple[int, ...]], names: list[str], *, failed: bool = False) -> None:
    for prompt, request in zip(prompts, names, strict=True):
        output = engine.output(request)
        assert output.is_finished()
        if not failed:
            assert output.error is None
        if output.error is None:
            assert output.generated_tokens == by_generate(name, prompt, NEW)[0]
    engine.check_integrity()


@pytest.mark.parametrize("seed", range(12 * TIMES))
def test_after_an_interrupt_at_any_line_every_request_has_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    prompts, left = some(rng), rng.randrange(200, 20000)
    engine = engine_of(name, rng)
    names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]

    steps_with_an_interrupt(engine, names, left)
    check(engine, name, prompts, names)
    engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_wherever_an_interrupt_ends_a_packed_forward_the_next_one_of_others_is_not_taken_for_it(name: str) -> None:
    prompt, left, came = tuple(range(3, 12)), 0, True
    right = by_generate(name, prompt, NEW)[0]
    engine = Engine(model_of(name), host_budget="8MiB", block_size=4)
    while came:
        left += 1
        request = engine.add_request(list(prompt), max_new_tokens=2, do_sample=False)
        came = steps_with_an_interrupt(engine, [request], left, within="hf/attention/packed.py")
        found = engine.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert found[0, len(prompt) :].tolist() == right
    engine.close()
    assert left > 10


@pytest.mark.parametrize("seed", range(10 * TIMES))
def test_a_forward_that_raises_costs_no_other_request_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(("llama", "gemma3", "qwen3_next", "jamba", "falcon"))
    prompts, model = some(rng), tiny_model(name)
    engine = engine_of(name, rng)
    raising, count = [rng.randrange(3, 60) for _ in range(rng.choice((1, 2, 3)))], 0

    def hook(module: torch.nn.Module, args: Any) -> None:
        nonlocal count
        count += 1
        if count in raising:
            raise RuntimeError("a forward fails")

    parts = [m for m in model.modules() if type(m).__name__.endswith("MLP") or "Moe" in type(m).__name__]
    handles = [m.register_forward_pre_hook(hook) for m in parts]
    try:
        names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]
        for _ in range(400):
            if not engine.step():
                break
    finally:
        for handle in handles:
            handle.remove()
    check(engine, name, prompts, names, failed=True)
    assert sum(engine.output(each).error is not None for each in names) <= len(raising)
    engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("started", [False, True])
def test_a_step_that_cannot_be_undone_is_cut_short_and_later_requests_have_their_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, started: bool
) -> None:
    prompts = some(random.Random(1), 3)
    engine = engine_of(name, random.Random(0))
    forward = engine._runner.forward  # type: ignore[attr-defined]

    def fails(*_: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(forward, "undo", cannot)
        raise RuntimeError("a forward fails")

    def cannot() -> None:
        monkeypatch.undo()
        raise RuntimeError("nor is it undone")

    def add() -> list[str]:
        return [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]

    monkeypatch.setattr(forward, "count_layer", fails)
    names = add()
    if started:
        engine.start()
        for each in names:
            assert "nor is it undone" in str(engine.wait(each, timeout=60).error)
        names = add()
    else:
        with pytest.raises(RuntimeError, match="nor is it undone"):
            engine.step()
    for each in names:
        engine.wait(each, timeout=60)
    engine.stop()
    check(engine, name, prompts, names)
    engine.close()


def raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("a processor fails")


def gives_two_rows(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.repeat(2, 1)


def gives_more_tokens(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.cat([scores, scores + 99], 1)


@pytest.mark.parametrize("processor", [raises, gives_two_rows, gives_more_tokens])
def test_a_processor_that_fails_ends_its_own_request(processor: Any) -> None:
    prompts = some(random.Random(1), 4)
    with engine_of("llama", random.Random(0)) as engine:
        names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]
        bad = engine.add_request([5, 6, 7], max_new_tokens=NEW, logits_processor=[processor])
        assert isinstance(engine.wait(bad).error, ValueError)
        for each in names:
            engine.wait(each)
        check(engine, "llama", prompts, names)


BARRED: dict[str, dict[str, Any]] = {
    "settings": {"suppress_tokens": list(range(128))},
    "settings, of which the last draws": {"suppress_tokens": list(range(128)), "top_h": 0.5},
    "a temperature": {"temperature": 1e-40},
    "a processor": {"logits_processor": [lambda ids, scores: scores * float("nan")]},
}


@pytest.mark.parametrize("how", [*BARRED, "the model"])
def test_a_request_that_no_token_is_left_for_fails_alone_and_by_its_own_fault(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some(random.Random(1), 4)
    with engine_of("llama", random.Random(0)) as engine:
        if how == "the model":
            step = engine._runner.step

            def spoils(work: Any) -> Any:
                return [
                    row if row is None or each.ids[:3] != [5, 6, 7] else row * float("nan")
                    for each, row in zip(work, step(work), strict=True)
                ]

            monkeypatch.setattr(engine._runner, "step", spoils)
        names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]
        asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
        whole = engine.add_request([9, 8, 7], **asked, seed=3)
        bad = engine.add_request([5, 6, 7], **asked, **BARRED.get(how, {}))
        error = engine.wait(bad).error
        assert isinstance(error, ValueError)
        assert isinstance(error, ConfigError) == (how != "the model")
        assert engine.wait(whole).finish_reason == "length"
        for each in names:
            engine.wait(each)
        check(engine, "llama", prompts, names)


@pytest.mark.parametrize("place", ["begin", "keep", "computed"])
def test_what_fails_as_a_request_comes_or_goes_takes_no_other_with_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = some(random.Random(2), 5)
    with engine_of("llama", random.Random(0)) as engine:
        works, broken = getattr(engine._prefixes, place), set[str]()

        def breaks(request: Any, *args: Any) -> Any:
            if request.name in broken:
                raise OSError("the disk is gone")
            return works(request, *args)

        monkeypatch.setattr(engine._prefixes, place, breaks)
        names = [f"request {i}" for i in range(5)]
        broken.add(names[2])
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(list(prompt), request_id=name, max_new_tokens=NEW, do_sample=False)
        outputs = [engine.wait(each) for each in names]
        assert [x.error is not None for x in outputs] == [i == 2 and place == "begin" for i in range(5)]
        monkeypatch.undo()
        engine.check_integrity()
        left = [i for i in range(5) if outputs[i].error is None]
        check(engine, "llama", [prompts[i] for i in left], [names[i] for i in left])


def test_drawn_tokens_are_the_same_beside_a_processor_that_raises() -> None:
    calls = itertools.count()

    def raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(calls) >= 3:
            raise ValueError("a processor fails")
        return scores

    drawn = []
    for others in (0, 2):
        calls = itertools.count()
        with engine_of("llama", random.Random(0)) as engine:
            names = [engine.add_request([5, 6, 7 + i], max_new_tokens=NEW, do_sample=True, seed=i) for i in range(3)]
            for _ in range(others):
                engine.add_request([5, 6, 7], max_new_tokens=NEW, do_sample=True, logits_processor=[raises])
            drawn.append([engine.wait(name).generated_tokens for name in names])
    assert drawn[0] == drawn[1]


def test_who_waits_hears_of_it_when_the_thread_ends_and_it_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        pass

    added = threading.Event()

    def panics(work: object) -> None:
        added.wait(120)
        raise Panic

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with engine_of("llama", random.Random(0)) as engine:
        step, engine._runner.step = engine._runner.step, panics
        engine.start()
        names = [engine.add_request([5, 6, i], max_new_tokens=NEW, do_sample=False) for i in range(1, 4)]
        added.set()
        found = [engine.wait(name, timeout=120) for name in names]
        assert all(isinstance(x.error, Panic) for x in found)
        assert until(lambda: not engine.alive)
        engine._runner.step = step
        by_hand = engine.add_request([5, 6, 1], max_new_tokens=NEW, do_sample=False)
        assert engine.wait(by_hand, timeout=120).finish_reason == "length"
        engine.start()
        assert engine.alive
        again = engine.add_request([5, 6, 1], max_new_tokens=NEW, do_sample=False)
        assert engine.wait(again, timeout=120).generated_tokens == engine.output(by_hand).generated_tokens
        engine.stop()
        engine.check_integrity()


def until(what: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


def test_threads_add_stream_and_cancel_while_the_loop_runs() -> None:
    failed: list[BaseException] = []

    def use(engine: Engine, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for prompt in some(rng, 5):
                name = engine.add_request(list(prompt), max_new_tokens=NEW, do_sample=False)
                if rng.random() < 0.3:
                    engine.cancel(name)
                    assert engine.wait(name, 120).finish_reason in ("cancelled", "length")
                    continue
                assert list(engine.stream(name, 120)) == by_generate("llama", prompt, NEW)[0]
        except BaseException as error:
            failed.append(error)

    for prompt in [p for seed in range(6) for p in some(random.Random(seed), 5)]:
        by_generate("llama", prompt, NEW)
    with engine_of("llama", random.Random(2)) as engine:
        threads = [threading.Thread(target=use, args=(engine, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failed, failed
        assert not any(thread.is_alive() for thread in threads)
    assert not any(thread.name == "kvtier-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon"])
@pytest.mark.parametrize("given", [{"host_budget": 1}, {"device_budget": 1, "host_budget": 1}], ids=["host", "both"])
def test_too_small_a_budget_for_the_trial_names_the_smallest_that_works(name: str, given: dict[str, int]) -> None:
    given = dict(given)
    for _ in given:
        with pytest.raises(BudgetError, match="An engine tries its model") as refused:
            Engine(tiny_model(name), block_size=4, **given)
        assert refused.value.__suppress_context__, "the traceback of the trial helps nobody"
        assert f"{refused.value.tier}_budget={refused.value.needed}" in str(refused.value)
        given[f"{refused.value.tier}_budget"] = refused.value.needed
        if refused.value.tier == "host":
            break
    Engine(tiny_model(name), block_size=4, **given).close()
    for tier in given:
        with pytest.raises(BudgetError):
            Engine(tiny_model(name), block_size=4, **{**given, tier: given[tier] - 1})


@pytest.mark.parametrize(("block_size", "slots"), [(16, 1), (32, 0), (64, 0)])
def test_the_budget_that_is_named_has_a_slot_only_where_blocks_are_sealed(block_size: int, slots: int) -> None:
    model = tiny_model("llama")
    with pytest.raises(BudgetError, match="An engine tries its model") as refused:
        Engine(model, device_budget=1, host_budget="8MiB", block_size=block_size)
    needed = refused.value.needed
    prompts = [tuple(3 + i % 99 for i in range(n)) for n in (5, block_size - 3, block_size, 2 * block_size + 1)]
    with Engine(model, device_budget=needed, host_budget="8MiB", block_size=block_size) as engine:
        assert engine.memory.stats.device.peak_bytes <= needed
        block = engine._runner.forward.block_bytes()  # type: ignore[attr-defined]
        layer = block // model.config.num_hidden_layers
        # Two sequences have an open block in every layer, and one layer is read through room of a block.
        assert needed == 2 * block + layer + slots * layer
        for prompt in prompts:
            found = engine.wait(engine.add_request(list(prompt), max_new_tokens=4, do_sample=False), 120)
            assert found.generated_tokens == by_generate("llama", prompt, 4)[0]
        engine.check_integrity()
    with pytest.raises(BudgetError):
        Engine(model, device_budget=needed - 1, host_budget="8MiB", block_size=block_size)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon"])
def test_a_trial_that_finds_no_room_says_nothing_of_the_model(name: str, kind: type[Exception]) -> None:
    model, memory = tiny_model(name), TieredMemory(host_budget="8MiB")
    before, forwards, at = model.config._attn_implementation, list[int](), -1

    def fails(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == at:
            raise kind("out of memory")

    layers = model.transformer.h if name == "falcon" else model.model.layers
    handle = layers[1].register_forward_pre_hook(fails)
    with contextlib.closing(memory):
        Engine(model, memory=memory).close()
        last = len(forwards)
        for number in (1, last // 2, last):
            at = number
            forwards.clear()
            with pytest.raises(kind):
                Engine(model, memory=memory)
            assert model.config._attn_implementation == before
            assert not memory.owners
    handle.remove()


def test_in_a_memory_of_others_too_small_a_budget_counts_what_they_hold() -> None:
    model = tiny_model("llama")
    with kvtier.TieredMemory(host_budget="150KB") as memory, kvtier.TieredKVCache(model.config, memory=memory) as other:
        model.generate(torch.ones(1, 4, dtype=torch.long), past_key_values=other, max_new_tokens=2)
        held = memory.stats.host.bytes
        assert held
        with pytest.raises(BudgetError, match="An engine tries its model") as refused:
            Engine(model, memory=memory, block_size=4)
        assert refused.value.needed > held


@pytest.mark.parametrize("wrong", [tiny_model("llama").config, "llama", None, 5, type(tiny_model("llama"))])
@pytest.mark.parametrize("of", [Engine, kvtier.ConversationStore])
def test_what_is_no_model_is_refused(of: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model is .*, not a loaded Transformers model that generates"):
        of(wrong, host_budget="64KiB")


def test_a_request_that_may_outgrow_a_table_of_positions_is_refused() -> None:
    """On CUDA a position that is none ends every later forward, too."""
    model = build_model("gpt2", "sdpa", n_positions=24)
    with Engine(model, host_budget="8MiB", block_size=4) as engine:
        for options in ({"max_new_tokens": 16}, {"max_length": 26}, {"max_new_tokens": 1000}):
            with pytest.raises(ConfigError, match="24 positions"):
                engine.add_request(range(1, 11), do_sample=False, **options)
        with pytest.raises(ConfigError, match="24 positions"):
            engine.add_request(range(1, 26), max_new_tokens=1)
        (output,) = engine.generate_batch([range(1, 11)], max_new_tokens=15, do_sample=False).values()
        right = model.generate(torch.arange(1, 11)[None], max_new_tokens=15, do_sample=False)
        assert output.generated_tokens == right[0, 10:].tolist()


def test_what_cannot_be_is_refused_when_it_is_added() -> None:
    engine = Engine(tiny_model("llama"), host_budget="64KiB", block_size=4, max_waiting=2)
    with pytest.raises(BudgetError, match="does not fit"):
        engine.add_request([5] * 2000, max_new_tokens=4)
    with pytest.raises(ConfigError, match="at least one token"):
        engine.add_request([])
    with pytest.raises(ConfigError, match="leaves none"):
        engine.add_request([5] * 30, max_length=20)
    for wrong in ("high", [], None, 0.5):
        with pytest.raises(ConfigError, match="priority"):
            engine.add_request([5], max_new_tokens=4, priority=wrong)
    options = {"tenant": [5], "salt": [[1], {}], "top_logprobs": [-1, 2.5, "3", True], "listener": [5]}
    for name, wrongs in options.items():
        for wrong in wrongs:
            with pytest.raises(ConfigError, match=name):
                engine.add_request([5], max_new_tokens=4, **{name: wrong})
    with pytest.raises(ConfigError, match="priority"):
        engine.generate_batch([[5]], max_new_tokens=4, priority="high")
    assert engine.load.waiting == 0
    with pytest.raises(ConfigError, match="more than may wait"):
        engine.add_request([5], max_new_tokens=4, do_sample=True, num_return_sequences=3)
    with pytest.raises(ConfigError, match="num_bananas"):
        engine.add_request([5], num_bananas=4)
    with pytest.raises(kvtier.UnsupportedError, match="num_beams"):
        engine.add_request([5], num_beams=4)
    engine.add_request([5], request_id="a", max_new_tokens=4)
    with pytest.raises(ConfigError, match="has not ended"):
        engine.add_request([5], request_id="a", max_new_tokens=4)
    engine.add_request([5], max_new_tokens=4)
    with pytest.raises(QueueFullError):
        engine.add_request([5], max_new_tokens=4)
    while engine.step():
        pass
    assert engine.output("a").finish_reason == "length"
    engine.close()
    with pytest.raises(kvtier.ClosedError):
        engine.add_request([5])


@pytest.mark.parametrize("preemption", ["swap", "recompute", "price"])
def test_what_outgrows_the_device_comes_back_by_the_way_that_was_asked_for(preemption: str) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1, 128) for _ in range(20)) for _ in range(6)]
    size = 4
    model = tiny_model("llama")
    one = _bytes_of_a_block("llama", size)
    # Twelve blocks on the device: two prompts of five blocks, and each grows by two.
    engine = Engine(
        model, device_budget=13 * one, host_budget=200 * one, block_size=size, spill=False, preemption=preemption
    )
    names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in prompts]
    swapped = False
    while engine.step():
        engine.check_integrity()
        if engine._prefixes is not None:
            for request, entry in engine._prefixes._swapped.items():
                swapped = True
                assert request.job in engine._requests.waiting
                assert not any(
                    run.device is not None and run.refs == 1
                    for table in entry.sequence.tables.values()
                    for run in table.resolve()
                ), "what is swapped is on the device still"
    outputs = [engine.output(each) for each in names]
    assert sum(x.preempted for x in outputs) > 0
    count = sum(x.swapped for x in outputs)
    assert (count > 0) == swapped
    assert count == (
        sum(x.preempted for x in outputs) if preemption == "swap" else 0 if preemption == "recompute" else count
    )
    check(engine, "llama", prompts, names)
    assert not engine._prefixes._swapped
    engine.close()


@pytest.mark.slow
def test_memory_is_bounded_over_many_tiny_requests() -> None:
    """20,000 of them, most of which share nothing: whatever is kept of each, it does not add up."""
    model, rng = tiny_model("llama"), random.Random(7)
    engine = Engine(model, host_budget="2MiB", block_size=4, max_running=64)
    sizes: list[int] = []
    sizes_of_python: list[int] = []
    done = 0
    try:
        while done < MANY:
            for _ in range(64):
                prompt = [rng.randrange(1, 120) for _ in range(rng.randrange(1, 6))]
                engine.add_request(prompt, max_new_tokens=rng.randrange(1, 4), do_sample=False)
                done += 1
            while engine.step():
                pass
            if done % 2048 == 0:
                gc.collect()
                sizes.append(resident())
                sizes_of_python.append(len(gc.get_objects()))
                engine.check_integrity()
        assert len(engine._requests.ended) <= MAX_ENDED
        assert not engine._requests.named
        assert len(engine._prefixes._kept.entries) < 2000, "what is kept is not bounded by the memory"
    finally:
        engine.close()
    print(f"{done} requests: {sizes[0] >> 20} to {sizes[-1] >> 20} MiB; objects {sizes_of_python}")
    # The first ones fill what is bounded: outputs that are kept, the memory, its index.
    later = sizes[len(sizes) // 2 :]
    assert max(later) - later[0] < 8 << 20
    assert sizes_of_python[-1] < 1.05 * sizes_of_python[len(sizes) // 2]


def test_a_sequence_that_was_cancelled_before_its_prompt_was_there_ends_once() -> None:
    engine = Engine(tiny_model("llama"), host_budget="8MiB", max_batch_tokens=8)
    name = engine.add_request(list(range(40)), max_new_tokens=3, do_sample=True, num_return_sequences=3)
    for each in (f"{name}#1", name):
        engine.step()
        engine.cancel(each)
    for _ in range(40):
        if not engine.step():
            break
    else:
        raise AssertionError("it never ends")
    assert [engine.output(each).finish_reason for each in (name, f"{name}#1", f"{name}#2")] == [
        "cancelled",
        "cancelled",
        "length",
    ]
    engine.close()


@pytest.mark.parametrize("seed", [1.5, "1", 1 << 64, -(1 << 63) - 1])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    with pytest.raises(ConfigError, match="seed="):
        engine.add_request([1, 2], max_new_tokens=3, do_sample=True, seed=seed)
    engine.close()


def test_sequences_of_a_prompt_have_seeds_behind_the_largest_one() -> None:
    engine, options = Engine(tiny_model("llama"), host_budget="8MiB"), {"max_new_tokens": 5, "do_sample": True}
    name = engine.add_request([1, 2], **options, seed=(1 << 64) - 1, num_return_sequences=2)
    again = engine.add_request([1, 2], **options, seed=0)
    while engine.step():
        pass
    assert engine.output(f"{name}#1").generated_tokens == engine.output(again).generated_tokens
    engine.close()


def test_what_a_preempted_prompt_has_computed_itself_is_not_counted_as_cached() -> None:
    """And what it began with at first is."""
    prompt = tuple(range(3, 73))
    by_generate("llama", prompt, NEW)
    with_head = [0, 33]
    for head in with_head:
        engine = Engine(tiny_model("llama"), host_budget="8MiB", block_size=4, max_batch_tokens=16)
        if head:
            engine.generate_batch([prompt[:head]], max_new_tokens=1)
        name = engine.add_request(list(prompt), max_new_tokens=NEW, do_sample=False)
        engine.step()
        requests = engine._requests
        for _ in range(2):
            with requests.lock, requests.change:
                requests.preempt(requests.named[name].job)
            engine.step()
        while engine.step():
            pass
        check(engine, "llama", [prompt], [name])
        assert (engine.output(name).preempted, engine.output(name).cached_tokens) == (2, head)
        engine.close()


def test_who_waits_for_a_queue_that_others_fill_does_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_model("llama"), host_budget="8MiB", max_waiting=1, max_running=1) as engine:
        add, go_on, step = engine._add, threading.Event(), engine._runner.step
        wait, did = engine._requests.lock.wait, list[str]()

        def waits(seconds: float | None = None) -> bool:
            if threading.current_thread() is batch:
                did.append("waits")
            return wait(seconds)

        engine._runner.step = lambda work: step(work) if go_on.wait(120) else []  # type: ignore[method-assign]
        running = engine.add_request([5, 6], max_new_tokens=2)
        assert until(lambda: engine.load.running == 1)
        engine.add_request([5, 7], max_new_tokens=2)
        monkeypatch.setattr(engine, "_add", lambda *args: did.append("tries") or add(*args))
        monkeypatch.setattr(engine._requests.lock, "wait", waits)
        batch = threading.Thread(target=engine.generate_batch, args=([[5, 8]],), kwargs={"max_new_tokens": 2})
        batch.start()
        assert until(lambda: len(did) > 1)
        go_on.set()
        batch.join(120)
        assert not batch.is_alive()
        assert engine.output(running).finish_reason == "length"
        assert did.count("tries") == 2
        assert (did[0], did[1]) == ("tries", "waits")


def no_room() -> BudgetError:
    return BudgetError("as told", tier="host", needed=1, budget=0)


def test_what_is_last_in_rank_gives_way_although_it_is_the_one_that_lacks_room() -> None:
    """It decodes, and the prompt of a higher priority goes on."""
    low, high = (5, 6, 7), tuple(range(9, 59))
    for prompt in (low, high):
        by_generate("llama", prompt, NEW)
    engine = Engine(tiny_model("llama"), host_budget="8MiB", block_size=4, max_batch_tokens=16)
    names = [engine.add_request(list(low), max_new_tokens=NEW, do_sample=False)]
    engine.step()
    names.append(engine.add_request(list(high), max_new_tokens=NEW, do_sample=False, priority=5))
    engine.step()
    first, second = (engine._requests.named[name] for name in names)
    step = engine._runner.step

    def refuses(work: Any) -> Any:
        if second.sequence is not None and any(each.sequence is first.sequence for each in work):
            raise no_room()
        return step(work)

    engine._runner.step = refuses  # type: ignore[method-assign]
    cached = second.job.cached
    engine.step()
    assert (first.output.preempted, second.output.preempted) == (1, 0)
    assert second.job.cached > cached, "the step was lost"
    while engine.step():
        engine.check_integrity()
    check(engine, "llama", [low, high], names)
    assert second.output.preempted == 0
    engine.close()


def test_a_request_that_is_preempted_while_a_failed_step_is_tried_again_is_not_computed() -> None:
    prompts = [(5, 6, 7), (8, 9, 10)]
    for prompt in prompts:
        by_generate("llama", prompt, NEW)
    engine = Engine(tiny_model("llama"), host_budget="8MiB", block_size=4)
    names = [engine.add_request(list(prompt), max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    engine.step()
    step, failures = engine._runner.step, [RuntimeError("a forward fails"), no_room()]
    second = engine._requests.named[names[1]]

    def fails(work: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return step(work)

    engine._runner.step = fails  # type: ignore[method-assign]
    while engine.step():
        engine.check_integrity()
    check(engine, "llama", prompts, names)
    assert [engine.output(name).preempted for name in names] == [0, 1]
    assert not second.lost, "its forward was tried, and has failed"
    engine.close()


def test_a_name_that_a_user_has_given_is_no_other_request_s() -> None:
    engine = Engine(tiny_model("llama"), host_budget="8MiB")
    ended = engine.add_request([5, 6], request_id="request-1", max_new_tokens=2)
    while engine.step():
        pass
    output = engine.output(ended)
    waits = engine.add_request([5, 6], request_id="request-3", max_new_tokens=2)
    names = [engine.add_request([5, 7], max_new_tokens=2) for _ in range(4)]
    assert len({ended, waits, *names}) == 6
    while engine.step():
        pass
    assert engine.output(ended) is output
    engine.close()


def test_a_name_is_of_one_request_of_a_batch() -> None:
    with Engine(tiny_model("llama"), host_budget="8MiB") as engine:
        with pytest.raises(ConfigError, match="of one request"):
            engine.generate_batch([[5, 6], [5, 7]], request_id="x", max_new_tokens=2)
        assert not engine.load.running
        assert not engine.load.waiting
        for prompt, failed in (([5, 6], False), ([], True)):
            (output,) = engine.generate_batch([prompt], request_id="x", max_new_tokens=2).values()
            assert (output.request_id, output.error is not None) == ("x", failed)


def test_a_turn_of_a_conversation_is_of_one_request_of_a_batch() -> None:
    model = tiny_model("llama")
    with ConversationStore(model, host_budget="8MiB") as store, Engine(model, store=store) as engine:
        with pytest.raises(ConfigError, match="conversation='x' is of one request, not of 2"):
            engine.generate_batch([[5, 6], [5, 7]], conversation="x", max_new_tokens=2)
        assert not engine.load.running
        assert not engine.load.waiting
        assert not store.names
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "seed": 1}
        first, *others = engine.generate_batch([[5, 6]], conversation="x", **options).values()
        assert store.open("x").ids == [5, 6, *first.generated_tokens]
        assert all(each.generated_tokens != first.generated_tokens for each in others)


def test_further_sequences_of_a_prompt_have_nothing_of_it_computed() -> None:
    with Engine(tiny_model("llama"), host_budget="8MiB", block_size=4) as engine:
        engine.wait(engine.add_request(list(range(1, 40)), max_new_tokens=1))
        name = engine.add_request(list(range(1, 40)), max_new_tokens=2, do_sample=True, num_return_sequences=3)
        outputs = [engine.wait(each) for each in (name, f"{name}#1", f"{name}#2")]
        assert [each.cached_tokens for each in outputs] == [
            len(list(range(1, 40))) - 1,
            len(list(range(1, 40))),
            len(list(range(1, 40))),
        ]


def test_an_engine_whose_model_has_another_dtype_says_that_a_new_one_is_needed() -> None:
    model = build_model("llama", "sdpa")
    with Engine(model, host_budget="8MiB", block_size=4) as engine:
        model.to(torch.bfloat16)
        (output,) = engine.generate_batch([list(range(1, 40))], max_new_tokens=2).values()
        assert isinstance(output.error, MismatchError)
        assert "Of an engine, make a new one." in str(output.error)
