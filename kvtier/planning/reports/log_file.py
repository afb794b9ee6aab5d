"""The file of a decision log, one JSON object a line; and how answers in it compare with those given now."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, TypeVar

from kvtier.errors import ConfigError

T = TypeVar("T")
#: Kinds of logs: of a policy's decisions, and of a scheduler's.
DECISIONS, SCHEDULE = FORMATS = ("kvtier decisions 1", "kvtier schedule 1")
#: What asks a question of a log again: its kind ("" where nothing was asked), the answer in the log, the answer now.
Question = Callable[[], tuple[str, object, object]]


class LogFile:
    """A file that decisions are written to. A copy of it writes nothing, and neither does a process that is forked.

    Where it cannot be written any more, as on a full disk, it ends there with a warning: what is decided does not
    depend on it.

    Args:
        path: of the file, which is replaced.
        header: its first line.

    Raises:
        OSError: there can be no such file.
        ConfigError: another log is written to it.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        if any(log._is_at(path) for log in _OPEN):
            raise ConfigError(f"{path} is written by another decision log: close that one, or name another file.")
        self._file: IO[str] | None
        # Each line at once: a process that is forked would write, as it ends, what waits to be written here.
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - it stays open as long as somebody decides
        self._process = os.getpid()
        _OPEN.add(self)
        self.write(header)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line, so that a crash leaves it; nothing once it is closed."""
        self._attempt(lambda file: file.write(json.dumps(line, separators=(",", ":")) + "\n"))

    def close(self) -> None:
        """End the log."""
        self._attempt(lambda file: file.close())
        self._file = None

    def _attempt(self, what: Callable[[IO[str]], object]) -> None:
        file = self._file
        if file is None or file.closed or self._process != os.getpid():
            return
        try:
            what(file)
        except OSError as error:
            self._file = None
            with contextlib.suppress(OSError):
                file.close()  # it would write what it still has, and fail again
            warnings.warn(f"The decision log {file.name} ends early: {error}.", RuntimeWarning, stacklevel=4)

    def _is_at(self, path: str | Path) -> bool:
        file = self._file
        if file is None or self._process != os.getpid():
            return False
        try:
            return not file.closed and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except OSError:
            return False

    def __getstate__(self) -> dict[str, Any]:
        return {"_file": None, "_process": self._process}


#: Those whose file may be open.
_OPEN: weakref.WeakSet[LogFile] = weakref.WeakSet()


def class_of(decides: object) -> dict[str, str]:
    """Where the class of what decides is, as a field of a header: "module:Class". Empty for one that has a name in
    kvtier, or is in no module that others can import."""
    kind = type(decides)
    if kind.__module__.split(".")[0] in ("kvtier", "__main__") or "<" in kind.__qualname__:
        return {}
    return {"class": f"{kind.__module__}:{kind.__qualname__}"}


def header(path: str | Path) -> dict[str, Any]:
    """The first line of a log of any kind. Raises as `decided_again` does."""
    return next((line for number, line in _lines(path) if number == 1), {})


#: When who decides is asked.
_ASKED = {
    "policy": "A policy is asked once blocks leave the device, as with a smaller device_budget, or in a longer run.",
    "scheduler": "A scheduler is asked at each step of an engine that has requests.",
}


@dataclass(slots=True)
class Replay:
    """A run that was decided again.

    Attributes:
        decisions: answers that were compared.
        kinds: how many of each: "plan", "victims", "write_back", "load_from".
        differences: (line of the log, kind, the answer in the log, the answer now).
        cut: the line in the middle of which the log ends; None: it is whole.
        decides: who was asked: "policy", "scheduler".
    """

    decisions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    differences: list[tuple[int, str, object, object]] = field(default_factory=list)
    cut: int | None = None
    decides: str = "policy"

    def __str__(self) -> str:
        said = [self._compared()]
        if self.cut is not None:
            said.append(
                f"The log ends early, in the middle of line {self.cut}: what the run decided after that is not in it."
            )
        return "\n".join(said)

    def _compared(self) -> str:
        if not self.decisions:
            return f"Nothing was compared: the log has no decisions. {_ASKED[self.decides]}"
        counts = ", ".join(f"{n} of {kind}" for kind, n in sorted(self.kinds.items()))
        if not self.differences:
            return f"{self.decisions} decisions ({counts}): all the same."
        line, kind, was, now = self.differences[0]
        return (
            f"Of {self.decisions} decisions ({counts}) {len(self.differences)} differ, the first in line {line}: "
            f"{kind}: {_differing(kind, was, now)}."
        )


def decided_again(path: str | Path, kind: str, decides: str, ask: Callable[[dict[str, Any]], Question]) -> Replay:
    """Ask all questions of a log again, and compare the answers.

    Args:
        path: of a log.
        kind: of logs.
        decides: who answers, for errors: "policy".
        ask: a line as a question. It raises where the line is none.

    Raises:
        ConfigError: the file is no such log, or who answers fails at one of its questions.
        OSError: it cannot be read.
    """
    found, cut = Replay(decides=decides), list[int]()
    for number, line in _lines(path, cut):
        if number == 1:
            if line.get("log") != kind:
                raise ConfigError(f"{path} is a log of other decisions: {line.get('log')}.")
            continue
        try:
            question = ask(line)
        except WrongTypeError as error:
            raise ConfigError(f"{path}, line {number}: {error}.") from error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: this is not a line of a decision log.") from error
        try:
            asked, was, now = question()
        except Exception as error:  # whatever one of a user's own raises, or any for numbers that no run has
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}, line {number}: the {decides} fails at this question ({said}).") from error
        if not asked:
            continue  # told, and nothing asked
        found.decisions += 1
        found.kinds[asked] += 1
        if was != now:
            found.differences.append((number, asked, was, now))
    found.cut = cut[0] if cut else None
    return found


class WrongTypeError(Exception):
    """A line has something else where a number is to be."""


#: What is read for a field of each type, and in words. JSON writes some fractions as whole numbers.
_READ: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a string"),
}


def typed(found: T) -> T:
    """The same object. Raises WrongTypeError: a field holds something else than its type says."""
    for each in fields(found):  # type: ignore[arg-type]
        value, kind = getattr(found, each.name), str(each.type)
        if kind == "list[int]":
            for x in value if isinstance(value, list) else [value]:
                number(each.name, x)
        elif kind in _READ:
            _check(kind, each.name, value)
    return found


def number(name: str, value: Any) -> int:
    _check("int", name, value)
    return int(value)


def _check(kind: str, name: str, value: object) -> None:
    types, words = _READ[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise WrongTypeError(f"{name} is {value!r}, and has to be {words}")


#: Differences of an answer that are named.
_NAMED = 4


def _differing(kind: str, was: object, now: object) -> str:
    """What differs between two answers, by name."""
    if kind == "victims":
        was, now = ({"victims": [_victim(x) for x in each]} for each in (was, now) if isinstance(each, list))
    found = list(_parts(was, now, ""))
    said = [f"{name} {before} in the log, {after} now".lstrip() for name, before, after in found[:_NAMED]]
    more = len(found) - _NAMED
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")


def _victim(x: Any) -> dict[str, object]:
    return dict(zip(("candidate", "blocks", "latest_first"), x, strict=False))


def _parts(was: object, now: object, name: str) -> Iterator[tuple[str, object, object]]:
    """(name, in the log, now) of what differs, down to single numbers."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(x for x in now if x not in was)]:
            yield from _parts(was.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(was, list) and isinstance(now, list):
        if len(was) != len(now):
            yield f"number of {name}", len(was), len(now)
        for i, (before, after) in enumerate(zip(was, now, strict=False)):
            yield from _parts(before, after, f"{name}[{i}]")
    elif was != now:
        yield name, was, now


def _lines(path: str | Path, cut: list[int] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines with their numbers; `cut` gets that of a last one that was not written to its end."""
    number = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if number == 1 and (not isinstance(line, dict) or line.get("log") not in FORMATS):
                raise ConfigError(f"{path} is not a decision log of this version of kvtier.")
            if not isinstance(line, dict):
                if not text.endswith("\n"):
                    if cut is not None:
                        cut.append(number)
                    return  # the run was cut short while it wrote
                raise ConfigError(f"{path}, line {number}: this is not a line of a decision log.")
            yield number, line
    if not number:
        raise ConfigError(f"{path} is empty: the run wrote no decision log.")
