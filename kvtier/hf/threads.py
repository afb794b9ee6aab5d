"""Threads that use one cache: whether another one is inside a forward, or inside a generation, with it."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

from kvtier.errors import ConcurrentUseError
from kvtier.forward.steps import Steps

#: Callers that are looked at in search of a model's forward and of `generate`.
_MOST_FRAMES = 64
#: The file of `generate`.
_GENERATION = os.path.join("transformers", "generation", "utils.py")
#: Seconds that a thread may take to leave `generate` once it has told its streamer that it ends.
_LEAVING = 1.0
#: Seconds between two looks.
_PAUSE = 0.001


class Place(NamedTuple):
    """Where on its stack a thread was when it last began a forward with a cache.

    Attributes:
        forward: the outermost method named `forward`, and its code.
        generate: the innermost `generate` of Transformers, and its code.
        call: something that lives as long as that call of `generate`.
    """

    forward: tuple[int, CodeType] | None
    generate: tuple[int, CodeType] | None
    call: ref[Any] | None


class Places:
    """Where the threads are that use one cache. Each thread notes it for itself, when a forward begins.

    Another thread's frames are only compared by identity. To read their variables while that thread runs is not safe:
    CPython copies them from a stack that may be gone when a value that the copy replaces is destroyed.
    """

    def __init__(self) -> None:
        self._of: dict[int, Place] = {}

    def note(self) -> None:
        """Note where the current thread is."""
        me = threading.get_ident()
        frame: FrameType | None = sys._getframe(1)
        forward = generate = None
        for _ in range(_MOST_FRAMES):
            if frame is None or generate is not None:
                break
            code = frame.f_code
            if code.co_name == "forward":
                forward = frame
            elif code.co_name == "generate" and code.co_filename.endswith(_GENERATION):
                generate = frame
            frame = frame.f_back
        before = self._of.get(me)
        call = None
        if generate is not None:
            here = (id(generate), generate.f_code)
            if before is not None and before.generate == here and before.call is not None and before.call() is not None:
                call = before.call
            else:
                # Made anew by every call: the frame of a later call may have the address of an earlier one.
                config = generate.f_locals.get("generation_config")
                call = None if config is None else ref(config)
        self._of[me] = Place(_mark(forward), _mark(generate), call)
        _latest[me] = ref(self)

    def in_forward(self, thread: int) -> bool:
        """Whether a thread is in the forward that it noted."""
        place, latest = self._of.get(thread), _latest.get(thread)
        # A forward with another cache may be at the same address.
        ours = latest is not None and latest() is self
        return ours and place is not None and place.forward is not None and _on_stack(thread, place.forward)

    def in_generate(self, thread: int) -> bool:
        """Whether a thread is in the call of `generate` that it noted."""
        place = self._of.get(thread)
        if place is None or place.generate is None or (place.call is not None and place.call() is None):
            return False
        return _on_stack(thread, place.generate)


#: Where each thread noted its place last.
_latest: dict[int, ref[Places]] = {}
_walking = threading.RLock()


def _mark(frame: FrameType | None) -> tuple[int, CodeType] | None:
    return None if frame is None else (id(frame), frame.f_code)


def _on_stack(thread: int, mark: tuple[int, CodeType]) -> bool:
    """Whether a frame is on the stack of a thread. A frame object lives as long as its function runs, or longer."""
    with _walking:
        collects = gc.isenabled()
        gc.disable()  # Python 3.11 makes frame objects as it is asked for them, and may collect garbage in between
        try:
            frame = sys._current_frames().get(thread)
            while frame is not None:
                if id(frame) == mark[0] and frame.f_code is mark[1]:
                    return True
                frame = frame.f_back
            return False
        finally:
            if collects:
                gc.enable()


def check_alone(places: Places, steps: Steps) -> None:
    """Raise `ConcurrentUseError` where the thread of the last forward is still generating with this cache.

    Whoever is told by a streamer that a generation ends may come before that thread has left `generate`, so it is given
    time to; but not if it goes on. Called before anything is locked.
    """
    owner = steps.owner
    if owner == threading.get_ident() or not owner:
        return
    if not places.in_generate(owner):
        return
    count, deadline = steps.count, time.monotonic() + _LEAVING
    while steps.count == count and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        if not places.in_generate(owner):
            return
    raise ConcurrentUseError(
        "Another thread is generating with this TieredKVCache. Nothing was changed. Wait for it to end, or give each "
        "thread its own cache."
    )
