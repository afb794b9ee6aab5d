"""The decision log: what a policy was asked and what it answered, line by line, so that a run can be decided again.

    policy = Logged(Adaptive(), "decisions.jsonl")
    model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB", policy=policy))
    policy.close()
    assert not replay("decisions.jsonl", Adaptive()).differences

A policy sees numbers only and has neither clock nor chance, so it decides the same again without a model or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.policies.names import name_of, policy_of
from kvtier.planning.policy import Candidate, Policy, Victims, checked_victims
from kvtier.planning.rates import Rates
from kvtier.planning.reports.log_file import (
    DECISIONS,
    LogFile,
    Question,
    Replay,
    class_of,
    decided_again,
    number,
    typed,
)
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix
from kvtier.planning.step import LayerState, StepPlan, StepRecord, StepState, checked, whole


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
        self._log = LogFile(path, {"log": DECISIONS, "policy": name_of(policy)} | class_of(policy))

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        asked = asdict(state)
        plan = checked(self.policy.plan(state), len(state.layers))
        self._log.write({"plan": asked, "answer": _planned(plan)})
        return plan

    def use_rates(self, device: str, rates: Rates) -> None:
        """See `Policy.use_rates`."""
        self._log.write({"use_rates": device, "rates": asdict(rates)})
        self.policy.use_rates(device, rates)

    def observe(self, record: StepRecord) -> None:
        """See `Policy.observe`."""
        self._log.write({"observe": asdict(record)})
        self.policy.observe(record)

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        """See `Policy.victims`."""
        asked = [[x.layer, x.owner, x.evictable, x.transient, x.last_used] for x in candidates]
        chosen = list(checked_victims(self.policy.victims(candidates, blocks)))
        self._log.write({"victims": asked, "blocks": blocks, "answer": _chosen(chosen, candidates)})
        return chosen

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """See `Policy.write_back`."""
        answer = whole(self.policy.write_back(used_bytes, device_bytes, sealed), "write_back")
        self._log.write({"write_back": [used_bytes, device_bytes, sealed], "answer": answer})
        return answer

    def load_from(self, learned: LoadOrCompute, saved: SavedPrefix) -> int:
        """See `Policy.load_from`."""
        asked = {"load_from": asdict(saved), "learned": learned.as_json()}
        start = saved.checked(self.policy.load_from(learned, saved))
        self._log.write(asked | {"answer": start})
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
        self._log.close()


def replay(path: str | Path, policy: Policy | str) -> Replay:
    """Ask a policy what another one was asked, and compare the answers.

    Args:
        path: of a log.
        policy: unused so far, made as the one in the log was; or a name.

    Raises:
        ConfigError: the file is not such a log, or the policy fails at one of its questions; there is no such policy.
        OSError: it cannot be read.
    """
    return decided_again(path, DECISIONS, "policy", partial(_question, policy_of(policy)))


def _question(policy: Policy, line: dict[str, Any]) -> Question:
    """What asks."""
    was = line.get("answer")
    if "plan" in line:
        given = line["plan"]
        last = None if given["last"] is None else typed(StepRecord(**given["last"]))
        layers = [typed(LayerState(**x)) for x in given["layers"]]
        state = typed(StepState(**(given | {"layers": layers, "last": last})))
        return lambda: ("plan", was, _planned(checked(policy.plan(state), len(state.layers))))
    if "victims" in line:
        candidates = [typed(LoggedCandidate(*x)) for x in line["victims"]]
        blocks = number("blocks", line["blocks"])
        return lambda: (
            "victims",
            was,
            _chosen(list(checked_victims(policy.victims(candidates, blocks))), candidates),
        )
    if "write_back" in line:
        used, device, sealed = (number("write_back", x) for x in line["write_back"])
        return lambda: ("write_back", was, whole(policy.write_back(used, device, sealed), "write_back"))
    if "load_from" in line:
        saved = typed(SavedPrefix(**line["load_from"]))
        learned = LoadOrCompute.from_json(line["learned"])
        return lambda: ("load_from", was, saved.checked(policy.load_from(learned, saved)))
    tell: Callable[[], None]
    if "use_rates" in line:
        tell = partial(policy.use_rates, line["use_rates"], Rates(**line["rates"]))
    else:
        tell = partial(policy.observe, typed(StepRecord(**line["observe"])))

    def told() -> tuple[str, object, object]:
        tell()
        return "", None, None

    return told


def _planned(plan: StepPlan) -> dict[str, object]:
    """A checked plan as JSON has it."""
    rows = plan.on_host and sorted(plan.on_host)
    return {"layers": [asdict(x) for x in plan.layers], "reserve": plan.reserve, "on_host": rows}


def _chosen(victims: Sequence[Victims], candidates: Sequence[Candidate]) -> list[list[object]]:
    """Victims by their place among the candidates; None: it was not one of them."""
    place = {id(x): i for i, x in enumerate(candidates)}
    return [[place.get(id(x.candidate)), x.blocks, bool(x.latest_first)] for x in victims]
