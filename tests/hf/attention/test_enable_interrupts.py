"""An interrupt anywhere in a change of a model's attention: the lock is free, and the model is as it was."""

from __future__ import annotations

import contextlib
import dis
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from families import build_model
from transformers import PreTrainedModel

import kvtier
from kvtier.hf.attention import enable

FILES = (enable.__file__, contextlib.__file__)


class Signal:
    """Raises an interrupt in the place of the `at`-th signal that CPython could look for in some files: behind a call,
    where a function begins or goes on, and where a loop goes round.

    Attributes:
        came: whether it did.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.came = False
        self._last: dict[Any, str] = {}

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """Trace one event."""
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, name = self._last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self._last[frame] = name
            looks = last.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and not last.startswith("CALL_INTRINSIC")
            if looks and name != "RESUME" and not self.came:
                self.left -= 1
                if self.left < 0:
                    self.came = True
                    raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], object], at: int) -> BaseException | None:
    """What ends a call with an interrupt at a place; None: there are fewer places. Whoever keeps the error keeps its
    frames, as a prompt of Python does in `sys.last_exc`."""
    before, signal = sys.gettrace(), Signal(at)
    sys.settrace(signal)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    assert not signal.came
    return None


def free() -> bool:
    """Whether nobody holds the lock."""
    return not enable._CHANGES.lock._is_owned()


def names(model: PreTrainedModel) -> str | None:
    return model.config._attn_implementation


def test_an_interrupt_leaves_the_lock_of_changes_to_nobody() -> None:
    def hold() -> None:
        with enable.settled, enable.unchanged():
            pass

    at = 0
    while (error := interrupted(hold, at)) is not None:
        assert free(), f"held by whoever has the traceback of interrupt {at}"
        del error
        at += 1
    assert at


@pytest.mark.parametrize("twice", [False, True])
def test_a_model_that_was_to_be_enabled_is_as_it_was(twice: bool) -> None:
    model = build_model("llama", "eager")
    outer = kvtier.enable(model) if twice else None
    before, at, handles = names(model), 0, list[enable.Enabled]()
    while (error := interrupted(lambda: handles.append(enable.enable_for(model, "An Engine")), at)) is not None:
        assert free()
        assert names(model) == before
        del error
        at += 1
    assert at > 10
    with pytest.raises(kvtier.UnsupportedError, match="An Engine runs this"):  # the last one was not cut short
        kvtier.disable(model)
    (entry,) = enable._entries(model)
    assert [x.user for x in entry.claims] == [*[""] * twice, "An Engine"]
    handles.clear()  # as an interrupt does that comes before anybody has kept it
    gc.collect()  # frames that were traced
    assert names(model) == before
    assert [x.user for entry in enable._entries(model) for x in entry.claims] == [""] * twice
    del outer


def test_a_model_that_was_to_be_disabled_can_be() -> None:
    at, comes = 0, True
    while comes:
        model = build_model("llama", "eager")
        handle = kvtier.enable(model)
        error = interrupted(handle.disable, at)
        comes = error is not None
        assert free()
        handle.disable()
        assert names(model) == "eager"
        assert not enable._entries(model)
        at += 1
    assert at > 5


def test_what_was_abandoned_meanwhile_is_taken_back_by_the_next_change_at_the_latest() -> None:
    def hold() -> None:
        with enable.settled, enable.unchanged():
            pass

    at, comes = 0, True
    while comes:
        model = build_model("llama", "eager")
        handle = kvtier.enable(model)
        enable._ABANDONED.append((weakref.ref(model), handle._claim))  # as a finalizer does while a thread has the lock
        error = interrupted(hold, at)
        comes = error is not None
        assert free()
        hold()
        assert names(model) == "eager"
        assert not enable._ABANDONED
        at += 1
    assert at > 10
