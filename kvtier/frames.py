"""Frames of calls: whether one is still under way. An interrupt may skip any line that would say that it has ended."""

from __future__ import annotations

import sys
from types import FrameType


def is_running(call: FrameType) -> bool:
    """Whether this thread is in the midst of a call. One that was interrupted is on no stack, wherever that was."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
