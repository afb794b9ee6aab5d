"""An interrupt at any line of the package, while an engine computes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import kvtier
from kvtier import Engine

PACKAGE = str(Path(kvtier.__file__).parent)


def steps_with_an_interrupt(engine: Engine, names: Sequence[str], left: int, within: str = "") -> bool:
    """Let an engine compute until requests have ended; at line number `left` of a part of kvtier comes an interrupt.
    Whether it came."""
    part = str(Path(PACKAGE) / within)

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(part) else None

    for _ in range(400):
        before = sys.gettrace()
        try:
            sys.settrace(call if left > 0 else None)
            engine.step()
        except KeyboardInterrupt:
            left = -1
        finally:
            sys.settrace(before)
        if all(engine.output(each).is_finished() for each in names):
            break
    return left < 0
