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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvtier.errors import ConfigError
from kvtier.planning.costs import CostModel, Decision, Prediction, Rates
from kvtier.planning.policies.names import name_of, policy_of
from kvtier.planning.policy import Candidate, Policy, Victims, checked_victims
from kvtier.planning.step import LayerState, StepPlan, StepRecord, StepState, checked, whole

_FORMAT = "kvtier decisions 1"


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
        self._write({"log": _FORMAT, "policy": name_of(policy)})

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
        kinds: how many of each: "plan", "victims", "write_back".
        differences: (line of the log, kind, the answer in the log, the answer now).
    """

    decisions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    differences: list[tuple[int, str, object, object]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} of {kind}" for kind, n in sorted(self.kinds.items()))
        if not self.differences:
            return f"{self.decisions} decisions ({counts}): all the same."
        line, kind, was, now = self.differences[0]
        return (
            f"{len(self.differences)} of {self.decisions} decisions differ, the first in line {line}: {kind} was {was} "
            f"and is {now}."
        )


def logged_policy(path: str | Path) -> str:
    """What the policy of a log is called: its name, or that of its class. Raises as `replay` does."""
    return next((str(line.get("policy")) for number, line in _lines(path) if number == 1), "")


def replay(path: str | Path, policy: Policy) -> Replay:
    """Ask a policy what another one was asked, and compare the answers.

    Args:
        path: of a log.
        policy: unused so far, made as the one in the log was.

    Raises:
        ConfigError: the file is not such a log.
        OSError: it cannot be read.
    """
    found = Replay()
    for number, line in _lines(path):
        if number == 1:
            continue  # says what it is
        try:
            ask = _question(policy, line)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: this is not a line of a decision log.") from error
        kind, was, now = ask()
        if not kind:
            continue  # told, and nothing asked
        found.decisions += 1
        found.kinds[kind] += 1
        if was != now:
            found.differences.append((number, kind, was, now))
    return found


def _question(policy: Policy, line: dict[str, Any]) -> Callable[[], tuple[str, object, object]]:
    """What asks: kind ("" where nothing was asked), the answer in the log, the answer now."""
    was = line.get("answer")
    if "plan" in line:
        given = line["plan"]
        last = None if given["last"] is None else StepRecord(**given["last"])
        state = StepState(**(given | {"layers": [LayerState(**x) for x in given["layers"]], "last": last}))
        return lambda: ("plan", was, _planned(checked(policy.plan(state), len(state.layers))))
    if "victims" in line:
        candidates = [LoggedCandidate(*x) for x in line["victims"]]
        blocks = line["blocks"]
        return lambda: (
            "victims",
            was,
            _chosen(list(checked_victims(policy.victims(candidates, blocks))), candidates),
        )
    if "write_back" in line:
        used, device, sealed = line["write_back"]
        return lambda: ("write_back", was, whole(policy.write_back(used, device, sealed), "write_back"))
    tell: Callable[[], None]
    if "use_rates" in line:
        tell = partial(policy.use_rates, line["use_rates"], Rates(**line["rates"]))
    else:
        tell = partial(policy.observe, StepRecord(**line["observe"]))

    def told() -> tuple[str, object, object]:
        tell()
        return "", None, None

    return told


def _planned(plan: StepPlan) -> dict[str, object]:
    """A checked plan as JSON has it, whatever kind of collection its answers are."""
    rows = None if plan.on_host is None else [whole(x, "StepPlan.on_host") for x in plan.on_host]
    return {"layers": [asdict(x) for x in plan.layers], "reserve": plan.reserve, "on_host": rows and sorted(rows)}


def _chosen(victims: Sequence[Victims], candidates: Sequence[Candidate]) -> list[list[object]]:
    """Victims by their place among the candidates; None: it was not one of them."""
    place = {id(x): i for i, x in enumerate(candidates)}
    return [[place.get(id(x.candidate)), x.blocks, bool(x.latest_first)] for x in victims]


def _lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
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
                    return  # the run was cut short while it wrote
                raise ConfigError(f"{path}, line {number}: this is not a line of a decision log.")
            yield number, line
    if not number:
        raise ConfigError(f"{path} is empty: the run wrote no decision log.")
