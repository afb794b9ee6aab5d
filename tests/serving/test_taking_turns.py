"""Calls that take turns in one thread: their order, what is each one's own, and how they end."""

from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable

import pytest
import torch

from kvtier.serving.runners import turns
from kvtier.serving.runners.turns import Turns

pytest.importorskip("greenlet")
CPU = torch.device("cpu")


def test_each_goes_on_when_the_other_pauses() -> None:
    order: list[str] = []
    them = Turns()

    def call(name: str, times: int) -> str:
        for i in range(times):
            order.append(f"{name}{i}")
            them.pause()
        return name

    assert them.run([lambda: call("a", 3), lambda: call("b", 1)], CPU) == ["a", "b"]
    assert order == ["a0", "b0", "a1", "a2"]


def test_variables_of_a_context_are_each_calls_own() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    them = Turns()

    def call(value: int) -> tuple[int, int]:
        before = variable.get()
        variable.set(value)
        them.pause()
        return before, variable.get()

    assert them.run([lambda: call(1), lambda: call(2)], CPU) == [(7, 1), (7, 2)]
    assert variable.get() == 7


STATES: dict[str, Callable[[], object]] = {
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "function": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("name", STATES)
def test_a_call_does_not_pause_where_torch_keeps_something_for_the_thread(name: str) -> None:
    order: list[str] = []
    them = Turns()

    def first() -> None:
        with STATES[name]():  # type: ignore[attr-defined]
            order.append("first")
            them.pause()
            order.append("first goes on")
        them.pause()
        order.append("first ends")

    with torch.no_grad():
        them.run([first, lambda: order.append("second")], CPU)
        assert not torch.is_grad_enabled()
    assert order == ["first", "first goes on", "second", "first ends"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("raising", [0, 1])
def test_what_one_raises_ends_the_other_where_it_paused(kind: type[BaseException], raising: int) -> None:
    ended: list[int] = []
    them = Turns()

    def call(number: int) -> None:
        try:
            them.pause()
            if number == raising:
                raise kind("stop")
            them.pause()
        finally:
            ended.append(number)

    with pytest.raises(kind, match="stop") as raised:
        them.run([lambda: call(0), lambda: call(1)], CPU)
    # The traceback still holds both calls: that nobody has them any more is not what ended them.
    assert raised.tb is not None
    assert sorted(ended) == [0, 1]
    gc.collect()


def test_without_greenlet_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "greenlet", None)
    assert "kvtier[sub-batches]" in turns.why_not()
    with pytest.raises(turns.UnsupportedError, match="sub-batches"):
        Turns()
