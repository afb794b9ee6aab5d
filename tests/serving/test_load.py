"""What an engine has to do can be asked for at any time: a step that holds its locks keeps nobody waiting."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from families import build_model

from kvtier import BudgetError, Engine, Policy, TieredMemory
from kvtier.planning.policy import Candidate, Victims
from kvtier.scheduling.shares import GENERATED
from kvtier.serving.request import EngineLoad

PROMPT = list(range(1, 12))
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@contextlib.contextmanager
def held(model: Any, *locks: Any) -> Iterator[threading.Event]:
    """A forward that holds these locks until the block ends. The event is set when it does."""
    there, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            there.set()
            assert go_on.wait(180)

    handle = model.register_forward_pre_hook(hold)

    try:
        yield there
    finally:
        handle.remove()
        go_on.set()


def load_of(engine: Engine) -> EngineLoad:
    """In a thread of its own: the test fails where it waits."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(lambda: engine.load).result(60)
    finally:
        pool.shutdown(wait=False)


def test_samples_wait_until_their_prompt_is_there() -> None:
    with Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4, max_batch_tokens=8) as engine:
        engine.stop()
        engine.add_request(PROMPT, **OPTIONS | {"do_sample": True}, num_return_sequences=3)
        assert (engine.load.running, engine.load.waiting) == (0, 3)
        engine.step()
        assert (engine.load.running, engine.load.waiting) == (1, 2), "eight of eleven tokens are there"
        engine.step()
        assert (engine.load.running, engine.load.waiting) == (3, 0)
        while engine.step():
            pass
        assert (engine.load.running, engine.load.waiting) == (0, 0)


@pytest.mark.parametrize("most", [2, 256])
def test_a_sample_has_a_part_in_a_step_before_it_has_its_first_token(most: int) -> None:
    options = OPTIONS | {"do_sample": True, "num_return_sequences": 4}
    with Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4, max_running=most) as engine:
        name = engine.add_request(PROMPT, **options)
        for each in (name, *(f"{name}#{i}" for i in range(1, 4))):
            output = engine.wait(each, 120)
            assert output.scheduled is not None
            assert output.first_token is not None
            assert output.arrived <= output.scheduled <= output.first_token, each


def test_what_fits_alone_waits_while_others_run_and_is_not_refused() -> None:
    """What is kept of requests that run is theirs, and goes when they have ended."""
    model, rng = build_model("llama", "sdpa"), random.Random(0)
    with Engine(model, host_budget="600KB", block_size=4) as engine:
        engine.stop()
        most = engine.load.total_blocks * 4
        prompts = [[rng.randrange(1, 100) for _ in range(most // 8)] for _ in range(6)]
        large = [rng.randrange(1, 100) for _ in range(most // 2)]
        names = [engine.add_request(prompt, **OPTIONS | {"max_new_tokens": 12}) for prompt in prompts]
        while engine.load.running < 6:
            engine.step()
        names.append(engine.add_request(large, **OPTIONS))
        with pytest.raises(BudgetError):
            engine.add_request([1] * most, **OPTIONS)
        engine.step()
        assert engine.load.waiting == 1
        while engine.step():
            pass
        assert [engine.output(name).finish_reason for name in names] == ["length"] * 7  # type: ignore[union-attr]
        engine.check_integrity()


def test_an_engine_says_what_it_has_to_do_in_a_line_and_waits_for_nobody() -> None:
    model = build_model("llama", "sdpa")
    with Engine(model, host_budget="8MiB", block_size=4, max_running=1) as engine:
        assert repr(engine) == "Engine(packed, 0 running, 0 waiting)"
        engine.stop()
        names = [engine.add_request(PROMPT, **OPTIONS) for _ in range(3)]
        engine.step()
        with held(model, engine.memory.lock, engine._requests.lock) as there:
            engine.start()
            assert there.wait(180)
            pool = ThreadPoolExecutor(1)
            assert pool.submit(repr, engine).result(60) == "Engine(packed, 1 running, 2 waiting)"
            pool.shutdown(wait=False)
        for name in names:
            engine.wait(name, 120)
    assert repr(engine) == "Engine(closed)"


@pytest.mark.parametrize("kind", ["memory", "requests", "both"])
def test_a_load_is_told_while_a_forward_is_held(kind: str) -> None:
    model = build_model("llama", "sdpa")
    with Engine(model, host_budget="8MiB", block_size=4, max_running=1) as engine:
        locks = {"memory": [engine.memory.lock], "requests": [engine._requests.lock]}
        locks["both"] = locks["requests"] + locks["memory"]
        first = engine.add_request(PROMPT, **OPTIONS)
        engine.wait(first, 120)
        with held(model, *locks[kind]) as forward:
            second = engine.add_request([*PROMPT, 5], **OPTIONS)
            assert forward.wait(120)
            load = load_of(engine)
            assert (load.running, load.waiting, load.alive, load.steps) == (1, 0, True, engine.steps)
            assert 0 <= load.blocks <= load.total_blocks
            assert load.total_blocks > 0
        assert engine.wait(second, 120).error is None


def test_loads_agree_while_requests_come_and_go() -> None:
    model = build_model("llama", "sdpa")
    with Engine(model, host_budget="8MiB", block_size=4, max_running=2) as engine:
        names = [engine.add_request([i, *PROMPT], max_new_tokens=12, do_sample=False) for i in range(1, 9)]
        seen, end = list[EngineLoad](), time.monotonic() + 120
        while not all(engine.output(name).is_finished() for name in names):
            seen.append(engine.load)
            time.sleep(1e-4)  # who never waits keeps Python from the thread that runs steps
            assert time.monotonic() < end
        assert all(load.running <= 2 and load.running + load.waiting <= 8 for load in seen)
        # Nobody is lost on the way from those who wait to those who run: they only become fewer.
        left = [load.running + load.waiting for load in seen]
        assert left == sorted(left, reverse=True)
        load = engine.load
        assert (load.running, load.waiting, load.blocks) == (0, 0, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_no_more_sequences_of_a_prompt_run_at_a_time_than_may(family: str) -> None:
    model, found = build_model(family, "sdpa"), list[list[list[int]]]()
    options = {"max_new_tokens": 4, "do_sample": True, "seed": 3, "num_return_sequences": 5}
    for most in (2, 256):
        engine = Engine(model, host_budget="8MiB", block_size=4, max_running=most)
        name = engine.add_request(PROMPT, **options)
        while engine.step():
            engine.check_integrity()
            assert engine.load.running <= most
        outputs = [engine.output(each) for each in (name, *(f"{name}#{i}" for i in range(1, 5)))]
        # Copies of states are made before the last token of a prompt, and who waits goes on from these.
        least = len(PROMPT) - (family == "qwen3_next")
        assert all(each.cached_tokens >= least for each in outputs[1:])
        found.append([each.generated_tokens for each in outputs])
        engine.close()
    assert found[0] == found[1]


def test_a_tenant_was_served_what_was_computed_for_it_and_each_token_that_it_has() -> None:
    engine = Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4, max_batch_tokens=4)
    engine.add_request(PROMPT, max_new_tokens=3, do_sample=True, seed=3, num_return_sequences=4, tenant="a")
    while engine.step():
        pass
    computed = len(PROMPT) + 4 * (3 - 1)  # of each sequence all but the last token
    assert engine._requests.shares.served == {"a": computed + GENERATED * 4 * 3}
    engine.close()


def test_a_load_is_up_to_date_where_no_step_is_under_way() -> None:
    model = build_model("llama", "sdpa")
    engine = Engine(model, host_budget="8MiB", block_size=4)
    try:
        names = [engine.add_request(PROMPT, **OPTIONS) for _ in range(3)]
        assert (engine.load.running, engine.load.waiting) == (0, 3)
        engine.cancel(names[0])
        engine.step()
        running = engine.load
        assert running.running + running.waiting == 2
        assert running.blocks > 0
        while engine.step():
            pass
        load = engine.load
        assert (load.running, load.waiting, load.blocks) == (0, 0, 0)
    finally:
        engine.close()


def test_a_load_is_told_in_the_middle_of_a_change_and_behind_one_that_was_interrupted() -> None:
    class Asks(Policy):
        def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
            try:
                told.extend(each.load for each in engines)  # none, while the engine is made
            except Exception as error:  # the engine would try the step again
                failed.append(error)
            return super().victims(candidates, blocks)

    engines = list[Engine]()
    told, failed, model = list[EngineLoad](), list[Exception](), build_model("llama", "sdpa")
    memory = TieredMemory(device_budget="24KiB", host_budget="8MiB", policy=Asks())
    engine = Engine(model, memory=memory, block_size=4)
    engines.append(engine)
    name = engine.add_request(PROMPT * 4, max_new_tokens=30, do_sample=False)
    while engine.step():
        pass
    assert engine.output(name).error is None
    assert not failed
    assert told, "the policy was never asked"
    assert all(each.running == 1 for each in told)
    change = memory.change
    change._inside[threading.get_ident()] = None  # an interrupt came between two lines of it
    assert engine.load.running == 0
    engine.generate_batch([PROMPT], max_new_tokens=2, do_sample=False)
    engine.check_integrity()
    engine.close()
    memory.close()
