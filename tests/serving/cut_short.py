"""An interrupt at any line of the package, while an engine computes."""

from __future__ import annotations

import dis
import functools
import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvtier
from kvtier import Engine

_NOTHING = dis.opmap["NOP"]
PACKAGE = str(Path(kvtier.__file__).parent)


def interrupted(call: Callable[[], object], left: int, within: str = "") -> int:
    """Call; at line number `left` of a part of kvtier comes an interrupt, which ends the call. How many lines are left
    until it comes: 0, it has come."""
    part = str(Path(PACKAGE) / within)

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line" and not _is_between(frame)
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


def _is_between(frame: FrameType) -> bool:
    """Whether no interrupt can come at this line. CPython looks for one behind calls, where a function begins and where
    a loop goes round: so not where a `with` ends, between the last call within and that of `__exit__`; nor at a `try`,
    which does nothing."""
    begins = _withs(frame.f_code).get(frame.f_lineno)
    return (begins is not None and frame.f_lasti != begins) or frame.f_code.co_code[frame.f_lasti] == _NOTHING


@functools.cache
def _withs(code: CodeType) -> dict[int, int]:
    """Of each line that begins a `with`, where its code begins."""
    found = dict[int, int]()
    for begin, _, line in code.co_lines():
        if line is not None and linecache.getline(code.co_filename, line).lstrip().startswith("with "):
            found[line] = min(begin, found.get(line, begin))
    return found


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
