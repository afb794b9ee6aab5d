"""Threads that use one cache: whether another one is inside a forward, or inside a generation, with it."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from kvtier.errors import ConcurrentUseError
from kvtier.forward.steps import StepTracker

#: Callers that are looked at in search of a model's forward and of `generate`.
_MOST_FRAMES = 64
#: The file of `generate`.
_GENERATION = os.path.join("transformers", "generation", "utils.py")
#: Seconds that a thread may take to leave `generate` once it has told its streamer that it ends.
_LEAVING = 1.0
#: Seconds between two looks.
_PAUSE = 0.001


#: A frame: its address and its code. Another frame may have the address once this one is gone.
_Mark = tuple[int, CodeType]


class Place:
    """Where on its stack a thread was when it last began a forward with a cache.

    Attributes:
        forward: the outermost method named `forward`.
        generate: the innermost `generate` of Transformers.
        call: something that lives as long as that call of `generate`.
        depths: of `forward` and of the last frame that was looked at, `generate` where there is one.
        last: that frame.
    """

    __slots__ = ("call", "depths", "forward", "generate", "last")

    def __init__(
        self,
        forward: _Mark | None,
        generate: _Mark | None,
        call: ref[Any] | None,
        depths: tuple[int, int],
        last: _Mark | None,
    ) -> None:
        self.forward = forward
        self.generate = generate
        self.call = call
        self.depths = depths
        self.last = last

    def again(self) -> bool:
        """Note the place of the caller's caller, for the same thread, if it differs in its forward only.

        This looks at that frame and at those outside of it. A walk makes an object of each frame inside too: twenty
        microseconds in a model of Transformers.
        """
        forward, call = self.forward, self.call
        if forward is None or (self.generate is not None and (call is None or call() is None)):
            return False
        at, end = self.depths
        try:
            frame = sys._getframe(at + 2)
        except ValueError:  # the stack is not as deep
            return False
        if frame.f_code is not forward[1]:
            return False
        outer = frame
        for depth in range(at + 1, end + 1):  # as deep as before, and no other `generate` or `forward` is between
            back = outer.f_back
            if back is None or (depth < end and (back.f_code.co_name == "forward" or generates(back.f_code))):
                return False
            outer = back
        if _mark(outer) != self.last:
            return False
        self.forward = (id(frame), forward[1])
        return True


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
        place = self._of.get(me)
        if place is None or not place.again():
            self._of[me] = _look(sys._getframe(1), place)
        latest = _latest.get(me)
        if latest is None or latest() is not self:
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


def _mark(frame: FrameType | None) -> _Mark | None:
    return None if frame is None else (id(frame), frame.f_code)


def generates(code: CodeType) -> bool:
    """Whether a frame's code is that of `generate`."""
    return code.co_name == "generate" and code.co_filename.endswith(_GENERATION)


def _look(frame: FrameType, before: Place | None) -> Place:
    """The place of a thread that is in `frame`, which was in `before` last."""
    forward = generate = None
    depth, depths = 0, (0, 0)
    while True:
        code = frame.f_code
        if code.co_name == "forward":
            forward, depths = frame, (depth, depth)
        elif generates(code):
            generate = frame
        if generate is not None or frame.f_back is None or depth + 1 == _MOST_FRAMES:
            break
        frame, depth = frame.f_back, depth + 1
    call = None
    if generate is not None:
        here = _mark(generate)
        if before is not None and before.generate == here and before.call is not None and before.call() is not None:
            call = before.call
        else:
            # Every call makes its own: the frame of a later call may have the address of an earlier one.
            config = generate.f_locals.get("generation_config")
            call = None if config is None else ref(config)
    return Place(_mark(forward), _mark(generate), call, (depths[0], depth), _mark(frame))


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


def check_alone(places: Places, steps: StepTracker) -> None:
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
