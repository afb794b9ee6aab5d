"""An interrupt at any line of the package, while an engine computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import kvtier
from kvtier import Engine

PACKAGE = str(Path(kvtier.__file__).parent)


def interrupted(call: Callable[[], object], left: int, within: str = "") -> int:
    """Call; at line number `left` of a part of kvtier comes an interrupt, which ends the call. How many lines are left
    until it comes: 0, it has come."""
    part = str(Path(PACKAGE) / within)

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return line

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(part) else None

    before = sys.gettrace()
    try:
        sys.settrace(called if left > 0 else None)
        call()
    except KeyboardInterrupt:
        return 0
    finally:
        sys.settrace(before)
    return max(left, 0)


def steps_with_an_interrupt(
    engine: Engine, names: Sequence[str], left: int, within: str = "", steps: int = 400
) -> bool:
    """Let an engine compute until requests have ended, or so many steps; at line number `left` of a part of kvtier
    comes an interrupt. Whether it came."""
    for _ in range(steps):
        left = interrupted(engine.step, left, within)
        if all(engine.output(each).is_finished() for each in names):
            break
    return not left
