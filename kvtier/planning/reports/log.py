"""The decision log: what a policy was asked and what it answered, line by line, so that a run can be decided again.

    policy = Logged(Adaptive(), "decisions.jsonl")
    model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB", policy=policy))
    policy.close()
    assert not replay("decisions.jsonl", Adaptive()).differences

A policy sees numbers only and has neither clock nor chance, so it decides the same again without a model or a device.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from kvtier.errors import ConfigError
from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.policies.names import name_of, policy_of
from kvtier.planning.policy import Candidate, Policy, Victims, checked_victims
from kvtier.planning.rates import Rates
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix
from kvtier.planning.step import LayerState, StepPlan, StepRecord, StepState, checked, whole

_FORMAT = "kvtier decisions 1"

T = TypeVar("T")


@dataclass(slots=True)
class LoggedCandidate:
    """A candidate for eviction as it was when a policy was asked; see `Candidate`."""

    layer: int
    owner: int
    evictable: int
    transient: int
    last_used: int


class Logged(Policy):
    """Decides as another policy does, and writes down each question with its answer.

    Where the file cannot be written any more, as on a full disk, it ends there with a warning: what is decided does not
    depend on it. A copy, as of a cache that is copied or pickled, decides on without a log.

    Args:
        policy: that decides, an object or a name.
        path: of the file, which is replaced. One JSON object a line; see `replay`.

    Raises:
        OSError: there can be no such file.
        ConfigError: there is no such policy, or another one writes into this file.
    """

    def __init__(self, policy: Policy | str, path: str | Path) -> None:
        policy = policy_of(policy)
        super().__init__(write_through=policy.write_through, ahead=policy.ahead)
        self.policy, self.by_rows = policy, policy.by_rows
        if any(log._writes_into(path) for log in _LOGS):
            raise ConfigError(f"{path} is written by another Logged policy: close that one, or name another file.")
        self._file: IO[str] | None
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the policy serves
        _LOGS.add(self)
        self._write({"log": _FORMAT, "policy": name_of(policy)} | _class_of(policy))

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        asked = asdict(state)
        plan = checked(self.policy.plan(state), len(state.layers))
        self._write(
            {"plan": asked, "answer": _planned(plan)}, flush=True
        )  # once a step: a crash leaves what was before
        return plan

    def use_rates(self, device: str, rates: Rates) -> None:
        """See `Policy.use_rates`."""
        self._write({"use_rates": device, "rates": asdict(rates)})
        self.policy.use_rates(device, rates)

    def observe(self, record: StepRecord) -> None:
        """See `Policy.observe`."""
        self._write({"observe": asdict(record)})
        self.policy.observe(record)

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        """See `Policy.victims`."""
        asked = [[x.layer, x.owner, x.evictable, x.transient, x.last_used] for x in candidates]
        chosen = list(checked_victims(self.policy.victims(candidates, blocks)))
        self._write({"victims": asked, "blocks": blocks, "answer": _chosen(chosen, candidates)})
        return chosen

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """See `Policy.write_back`."""
        answer = whole(self.policy.write_back(used_bytes, device_bytes, sealed), "write_back")
        self._write({"write_back": [used_bytes, device_bytes, sealed], "answer": answer})
        return answer

    def load_from(self, learned: LoadOrCompute, saved: SavedPrefix) -> int:
        """See `Policy.load_from`."""
        asked = {"load_from": asdict(saved), "learned": learned.as_json()}
        start = saved.checked(self.policy.load_from(learned, saved))
        self._write(asked | {"answer": start}, flush=True)
        return start

    def prediction(self, cache: int, device: str) -> Prediction | None:
        """See `Policy.prediction`."""
        return self.policy.prediction(cache, device)

    def decisions(self, cache: int, device: str | None = None) -> list[Decision]:
        """See `Policy.decisions`."""
        return self.policy.decisions(cache, device)

    def model(self, cache: int, device: str | None = None) -> CostModel | None:
        """See `Policy.model`."""
        return self.policy.model(cache, device)

    def close(self) -> None:
        """End the log. The policy decides on without it."""
        self._attempt(lambda file: file.close())
        self._file = None

    def _writes_into(self, path: str | Path) -> bool:
        file = self._file
        try:
            return file is not None and not file.closed and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except OSError:
            return False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_file": None}

    def _write(self, line: dict[str, Any], *, flush: bool = False) -> None:
        def write(file: IO[str]) -> None:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if flush:
                file.flush()

        self._attempt(write)

    def _attempt(self, what: Callable[[IO[str]], object]) -> None:
        file = self._file
        if file is None or file.closed:
            return
        try:
            what(file)
        except OSError as error:
            self._file = None
            with contextlib.suppress(OSError):
                file.close()  # it would write what it still has, and fail again
            warnings.warn(f"The decision log {file.name} ends early: {error}.", RuntimeWarning, stacklevel=4)


#: Those whose file may be open.
_LOGS: weakref.WeakSet[Logged] = weakref.WeakSet()


@dataclass(slots=True)
class Replay:
    """A run that was decided again.

    Attributes:
        decisions: answers that were compared.
        kinds: how many of each: "plan", "victims", "write_back", "load_from".
        differences: (line of the log, kind, the answer in the log, the answer now).
        cut: the line in the middle of which the log ends; None: it is whole.
    """

    decisions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    differences: list[tuple[int, str, object, object]] = field(default_factory=list)
    cut: int | None = None

    def __str__(self) -> str:
        said = [self._compared()]
        if self.cut is not None:
            said.append(
                f"The log ends early, in the middle of line {self.cut}: what the run decided after that is not in it."
            )
        return "\n".join(said)

    def _compared(self) -> str:
        if not self.decisions:
            return (
                "Nothing was compared: the log has no decisions. A policy is asked once blocks leave the device, as "
                "they do with a smaller device_budget, or in a longer run."
            )
        counts = ", ".join(f"{n} of {kind}" for kind, n in sorted(self.kinds.items()))
        if not self.differences:
            return f"{self.decisions} decisions ({counts}): all the same."
        line, kind, was, now = self.differences[0]
        return (
            f"{len(self.differences)} of {self.decisions} decisions ({counts}) differ, the first in line {line}: "
            f"{kind}: {_differing(kind, was, now)}."
        )


def logged_policy(path: str | Path) -> str:
    """What the policy of a log is called: its name, or that of its class. Raises as `replay` does."""
    return str(_header(path).get("policy", ""))


def logged_class(path: str | Path) -> str | None:
    """Where the class of a log's policy is, as "module:Class"; None: it has a name in kvtier, or is in no module that
    others can import. Raises as `replay` does."""
    found = _header(path).get("class")
    return found if isinstance(found, str) else None


def _header(path: str | Path) -> dict[str, Any]:
    return next((line for number, line in _lines(path) if number == 1), {})


def _class_of(policy: Policy) -> dict[str, str]:
    kind = type(policy)
    if kind.__module__.split(".")[0] in ("kvtier", "__main__") or "<" in kind.__qualname__:
        return {}
    return {"class": f"{kind.__module__}:{kind.__qualname__}"}


def replay(path: str | Path, policy: Policy | str) -> Replay:
    """Ask a policy what another one was asked, and compare the answers.

    Args:
        path: of a log.
        policy: unused so far, made as the one in the log was; or a name.

    Raises:
        ConfigError: the file is not such a log, or the policy fails at one of its questions; there is no such policy.
        OSError: it cannot be read.
    """
    policy, found, cut = policy_of(policy), Replay(), list[int]()
    for number, line in _lines(path, cut):
        if number == 1:
            continue  # says what it is
        try:
            ask = _question(policy, line)
        except _WrongType as error:
            raise ConfigError(f"{path}, line {number}: {error}.") from error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: this is not a line of a decision log.") from error
        try:
            kind, was, now = ask()
        except Exception as error:  # whatever a policy of one's own raises, or any for numbers that no cache has
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}, line {number}: the policy fails at this question ({said}).") from error
        if not kind:
            continue  # told, and nothing asked
        found.decisions += 1
        found.kinds[kind] += 1
        if was != now:
            found.differences.append((number, kind, was, now))
    found.cut = cut[0] if cut else None
    return found


def _question(policy: Policy, line: dict[str, Any]) -> Callable[[], tuple[str, object, object]]:
    """What asks: kind ("" where nothing was asked), the answer in the log, the answer now."""
    was = line.get("answer")
    if "plan" in line:
        given = line["plan"]
        last = None if given["last"] is None else _typed(StepRecord(**given["last"]))
        layers = [_typed(LayerState(**x)) for x in given["layers"]]
        state = _typed(StepState(**(given | {"layers": layers, "last": last})))
        return lambda: ("plan", was, _planned(checked(policy.plan(state), len(state.layers))))
    if "victims" in line:
        candidates = [_typed(LoggedCandidate(*x)) for x in line["victims"]]
        blocks = _number("blocks", line["blocks"])
        return lambda: (
            "victims",
            was,
            _chosen(list(checked_victims(policy.victims(candidates, blocks))), candidates),
        )
    if "write_back" in line:
        used, device, sealed = (_number("write_back", x) for x in line["write_back"])
        return lambda: ("write_back", was, whole(policy.write_back(used, device, sealed), "write_back"))
    if "load_from" in line:
        saved = _typed(SavedPrefix(**line["load_from"]))
        learned = LoadOrCompute.from_json(line["learned"])
        return lambda: ("load_from", was, saved.checked(policy.load_from(learned, saved)))
    tell: Callable[[], None]
    if "use_rates" in line:
        tell = partial(policy.use_rates, line["use_rates"], Rates(**line["rates"]))
    else:
        tell = partial(policy.observe, _typed(StepRecord(**line["observe"])))

    def told() -> tuple[str, object, object]:
        tell()
        return "", None, None

    return told


class _WrongType(Exception):
    """A line has something else where a number is to be."""


#: What is read for a field of each type, and in words. JSON writes some fractions as whole numbers.
_READ: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a string"),
}


def _typed(found: T) -> T:
    """The same object. Raises _WrongType: a field holds something else than its type says."""
    for each in fields(found):  # type: ignore[arg-type]
        value, kind = getattr(found, each.name), str(each.type)
        if kind == "list[int]":
            for x in value if isinstance(value, list) else [value]:
                _number(each.name, x)
        elif kind in _READ:
            _check(kind, each.name, value)
    return found


def _number(name: str, value: Any) -> int:
    _check("int", name, value)
    return int(value)


def _check(kind: str, name: str, value: object) -> None:
    types, words = _READ[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise _WrongType(f"{name} is {value!r}, and has to be {words}")


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


def _planned(plan: StepPlan) -> dict[str, object]:
    """A checked plan as JSON has it, whatever kind of collection its answers are."""
    rows = None if plan.on_host is None else [whole(x, "StepPlan.on_host") for x in plan.on_host]
    return {"layers": [asdict(x) for x in plan.layers], "reserve": plan.reserve, "on_host": rows and sorted(rows)}


def _chosen(victims: Sequence[Victims], candidates: Sequence[Candidate]) -> list[list[object]]:
    """Victims by their place among the candidates; None: it was not one of them."""
    place = {id(x): i for i, x in enumerate(candidates)}
    return [[place.get(id(x.candidate)), x.blocks, bool(x.latest_first)] for x in victims]


def _lines(path: str | Path, cut: list[int] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines with their numbers; `cut` gets that of a last one that was not written to its end."""
    number = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if number == 1 and (not isinstance(line, dict) or line.get("log") != _FORMAT):
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
