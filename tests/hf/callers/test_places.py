"""Where a thread is on its stack: a note that looks at few frames says what a walk over the stack says."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvtier.hf.callers import threads
from kvtier.hf.callers.threads import Places

_SOURCE = """
def {name}(rest, then, generation_config=None):
    generation_config = generation_config or Config()
    return rest[0](rest[1:], then) if rest else then()
"""


class Config:
    """As long as a call of `generate` lives, so does one of these."""


def function(name: str, file: str = "model.py") -> Callable[..., Any]:
    """A function that calls the first of `rest` with the others, or `then`."""
    space: dict[str, Any] = {"Config": Config}
    exec(compile(_SOURCE.format(name=name), file, "exec"), space)
    return space[name]


OTHER, FORWARD, GENERATE = (
    function("other"),
    function("forward"),
    function("generate", os.path.join("transformers", "generation", "utils.py")),
)


def frames() -> list[FrameType]:
    """Those on the stack that are calls of the functions above, the innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code in (OTHER.__code__, FORWARD.__code__, GENERATE.__code__):
            found.append(frame)
        frame = frame.f_back
    return found


def place_of(places: Places) -> Any:
    return next(iter(places._of.values()))


def noted(places: Places) -> tuple[Any, Any, bool, list[FrameType]]:
    places.note()
    place = place_of(places)
    return place.forward, place.generate, place.call is not None and place.call() is not None, frames()


def compared(places: Places) -> tuple[Any, ...]:
    """What a note says, and what a walk says."""
    walked = Places()
    *found, alive, stack = noted(places)
    *expected, _, _ = noted(walked)
    marks = {(id(frame), frame.f_code) for frame in stack}
    assert found[0] is None or found[0] in marks, "a forward that is not on the stack"
    assert found[1] is None or (found[1] in marks and alive), "a generate that is not on the stack"
    return found, expected


@pytest.mark.parametrize("seed", range(20))
def test_a_note_says_what_a_walk_says(seed: int) -> None:
    rng, places = random.Random(seed), Places()
    stack: list[Callable[..., Any]] = []
    for _ in range(60):
        if not stack or rng.random() < 0.5:
            stack = [rng.choice((OTHER, FORWARD, OTHER, GENERATE)) for _ in range(rng.randrange(1, 7))]
        found, expected = stack[0](stack[1:], lambda: compared(places))
        assert found == expected


@pytest.mark.parametrize("outer", [GENERATE, OTHER])
def test_a_place_that_was_noted_is_not_walked_to_again(
    outer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    places, walks = Places(), []
    look = threads._look
    monkeypatch.setattr(threads, "_look", lambda *args: walks.append(1) or look(*args))

    def steps() -> None:
        for _ in range(10):
            FORWARD([OTHER], lambda: noted(places))

    outer([], steps)
    assert len(walks) == 1
    outer([], steps)  # the frame of this call may be at the address of the last one's
    assert len(walks) <= 2
    if outer is GENERATE:
        assert len(walks) == 2, "the last call of `generate` is taken for this one"


@pytest.mark.parametrize("between", [GENERATE, FORWARD])
def test_a_stack_that_is_as_deep_as_before_may_have_another_call_on_it(between: Callable[..., Any]) -> None:
    places = Places()

    def steps() -> None:
        OTHER([OTHER, FORWARD, OTHER], lambda: compared(places))
        found, expected = between([OTHER, FORWARD, OTHER], lambda: compared(places))
        assert found == expected

    steps()
