"""A process that is forked closes its copy of an engine, whatever threads of its parent are at."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from typing import Any

import pytest
from families import build_model

from kvtier import Engine


def closes_in_fork(engine: Engine) -> None:
    """Close an engine in a process that is forked now. What hangs there ends by a signal."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            engine.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
            closes_in_fork(engine)
        finally:
            ends.set()
        assert request.done.wait(60)
        assert len(request.output.generated_tokens) == 5
        engine.check_integrity()


@pytest.mark.parametrize("which", ["of steps", "of requests", "of the memory"])
def test_a_lock_that_a_thread_of_the_parent_has_hinders_nobody(which: str) -> None:
    held, ends = threading.Event(), threading.Event()
    engine = Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4)
    engine.add_request(list(range(1, 20)), max_new_tokens=5, do_sample=False)
    engine.step()
    locks: dict[str, Any] = {
        "of steps": engine._loop.stepping,
        "of requests": engine._requests.lock,
        "of the memory": engine.memory.lock,
    }

    def hold() -> None:
        with locks[which]:
            held.set()
            assert ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        closes_in_fork(engine)
    finally:
        ends.set()
        thread.join()
    while engine.step():
        pass
    engine.check_integrity()
    engine.close()
