"""A process that is forked closes its copy of an engine, whatever threads of its parent are at."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from families import build_model
from forked import held_by_a_thread, in_fork

from kvtier import Engine
from kvtier.hf.attention import enable


def test_an_engine_whose_thread_is_at_a_step_of_the_parent_is_closed_in_the_child() -> None:
    at, ends, parent = threading.Event(), threading.Event(), os.getpid()

    def listens(output: Any) -> None:
        at.set()
        assert os.getpid() != parent or ends.wait(60)

    with Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4) as engine:
        name = engine.add_request(list(range(1, 20)), max_new_tokens=5, do_sample=False, listener=listens)
        assert at.wait(60)
        request = engine._requests.named[name]
        try:
            in_fork(engine.close)
        finally:
            ends.set()
        assert request.done.wait(60)
        assert len(request.output.generated_tokens) == 5
        engine.check_integrity()


@pytest.mark.parametrize("which", ["of steps", "of requests", "of the memory", "of attention"])
def test_a_lock_that_a_thread_of_the_parent_has_hinders_nobody(which: str) -> None:
    engine = Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4)
    engine.add_request(list(range(1, 20)), max_new_tokens=5, do_sample=False)
    engine.step()
    locks: dict[str, Any] = {
        "of steps": engine._loop.stepping,
        "of requests": engine._requests.lock,
        "of the memory": engine.memory.lock,
        "of attention": enable._CHANGES.lock,
    }

    with held_by_a_thread(locks[which]):
        in_fork(engine.close)
    while engine.step():
        pass
    engine.check_integrity()
    engine.close()


def test_an_engine_that_is_closed_in_a_child_tells_nobody_who_listens_in_the_parent() -> None:
    told = list[str]()
    with Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4) as engine:
        engine.stop()
        engine.add_request(
            list(range(1, 20)), max_new_tokens=5, listener=lambda output: told.append(output.finish_reason)
        )

        def act() -> None:
            engine.close()
            assert not told

        in_fork(act)
        engine.close()
    assert told == ["cancelled"]
