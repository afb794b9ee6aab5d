"""How things are measured: contenders in one process, in turns, with their ratio taken turn by turn.

A machine drifts (clocks, other loads) more than contenders differ. So nobody runs all of its rounds at once: each round
gives every contender one turn, begins with another of them, and a ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.contenders import BASELINE, Case, Contender, Unavailable, contender, first_line
from benchmarks.models import Geometry
from benchmarks.records import Recorder, number, short, size, table
from kvtier import BudgetError


class Trial(Protocol):
    """One contender at work on one case. Making it does all that is not measured, warming up included."""

    def measure(self) -> float:
        """One turn; returns its value."""

    def facts(self) -> dict[str, Any]:
        """What else is worth recording, asked after the last turn."""

    def close(self) -> None:
        """Give all memory back."""


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and how far they lie apart."""

    n: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(len(values), statistics.median(values), min(values), max(values))

    def fields(self) -> dict[str, float]:
        """For a record."""
        return {"n": self.n, "median": self.median, "min": self.low, "max": self.high}

    def __str__(self) -> str:
        return f"{number(self.low)} .. {number(self.high)}"


@dataclass
class Outcome:
    """What became of one contender.

    Attributes:
        values: by round; a contender that used up its time sits out the later ones.
        status: `ok`; `unavailable`, it cannot be built here; `refused`, its budget is too small; `skipped`, memory is
            short; `failed`.
        reason: of anything but `ok`.
        facts: from its trial.
    """

    values: dict[int, float] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def end(self, error: Exception) -> None:
        """Note why it cannot go on."""
        self.status = (
            "unavailable"
            if isinstance(error, Unavailable)
            else "refused"
            if isinstance(error, BudgetError)
            else "failed"
        )
        name = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
        self.reason = name + first_line(error)

    def ratio(self, base: Outcome) -> Spread | None:
        """To another, within the rounds that both ran; None if there is none."""
        both = [self.values[i] / base.values[i] for i in self.values if base.values.get(i)]
        return Spread.of(both) if both else None


Start = Callable[[], Trial]


def compare(
    starts: Mapping[str, Start], *, rounds: int, together: bool, allowance: float, tell: Callable[[str], None]
) -> dict[str, Outcome]:
    """Give every contender its turn in each round.

    Args:
        starts: begin a trial, by name.
        rounds: turns of each.
        together: keep all trials from round to round; else each turn has a trial of its own.
        allowance: seconds that one contender may measure in all; beyond, it sits out.
        tell: is told what is going on.
    """
    outcomes = {name: Outcome() for name in starts}
    trials: dict[str, Trial] = {}
    spent = dict.fromkeys(starts, 0.0)
    names = list(starts)

    def end(name: str) -> None:
        trial = trials.pop(name, None)
        if trial is not None:
            trial.close()
            del trial
            release_memory()

    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                outcome = outcomes[name]
                if outcome.status != "ok" or spent[name] > allowance:
                    continue
                tell(f"round {turn + 1} of {rounds}: {name}")
                try:
                    if name not in trials:
                        trials[name] = starts[name]()
                    began = time.perf_counter()
                    outcome.values[turn] = trials[name].measure()
                    spent[name] += time.perf_counter() - began
                    outcome.facts = trials[name].facts()
                except Exception as error:
                    outcome.end(error)
                    outcome.values.clear()
                if outcome.status != "ok" or not together:
                    end(name)
    finally:
        for name in names:
            end(name)
        tell("")
    return outcomes


def release_memory() -> None:
    """Return what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Settings:
    """The command line. None and 0 leave the choice to the scenario.

    Attributes:
        model, contexts, contenders, rounds, new_tokens, block_size: what to measure, and how often.
        device, dtype: where and in what.
        quick: small sizes, to see that everything runs.
        deadline: `time.monotonic()` at which no further case begins.
        emulated: mark records as made on an emulated device.
        terminal: show progress.
    """

    model: str | None
    contexts: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int
    new_tokens: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    out: Path
    quick: bool
    deadline: float
    emulated: bool
    terminal: bool


class Bench:
    """What a scenario works with: the settings, the model, comparisons that are printed and recorded.

    Attributes:
        settings: the command line.
        failed: how many contenders failed so far. A budget that is too small is a finding, not a failure.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.failed = 0
        self._recorder = Recorder(settings.out, settings.device, emulated=settings.emulated)
        self._models: dict[str, PreTrainedModel] = {}
        self._line = 0

    # What to measure

    def model_names(self, *usual: str) -> tuple[str, ...]:
        """`--model`, or what is usual."""
        if self.settings.model is not None:
            return (self.settings.model,)
        return usual[:1] if self.settings.quick else usual

    def rounds(self, usual: int) -> int:
        """`--rounds`, or what is usual."""
        return self.settings.rounds or (2 if self.settings.quick else usual)

    def tokens(self, usual: int) -> int:
        """`--new-tokens`, or what is usual, in one turn."""
        return self.settings.new_tokens or (4 if self.settings.quick else usual)

    def model(self, name: str) -> PreTrainedModel:
        """A model, loaded once; the one before it is dropped."""
        if name not in self._models:
            self._models.clear()
            release_memory()
            self.tell(f"loading {models.label(name)}")
            self._models[name] = models.load(name, self.settings.device, self.settings.dtype)
        return self._models[name]

    def contenders(self, *usual: str) -> list[Contender]:
        """`--contenders`, or what is usual."""
        return [contender(name) for name in self.settings.contenders or usual]

    def cases(self, scenario: str, model: str, usual: Sequence[int], new_tokens: int) -> Iterator[Case]:
        """One case for each context, as long as there is time. What is not reached is recorded as such."""
        settings = self.settings
        contexts = settings.contexts or (tuple(usual[:2]) if settings.quick else tuple(usual))
        config = models.config_of(model)
        geometry = Geometry.of(config, settings.dtype)
        for context in contexts:
            if time.monotonic() >= settings.deadline:
                print(f"{scenario} · {models.label(model)} · {context:,} tokens: not reached in time", flush=True)
                self._recorder.add(
                    scenario,
                    status="not reached in time",
                    workload={"model": models.label(model), "context": context},
                )
                continue
            yield Case(config, geometry, settings.device, context, new_tokens, settings.block_size)

    # Measuring

    def compare(
        self,
        scenario: str,
        model: str,
        case: Case,
        starts: Mapping[str, tuple[Contender | None, Start]],
        *,
        unit: str,
        rounds: int,
        base: str = BASELINE,
        note: Callable[[dict[str, Any]], str] = lambda facts: "",
        **workload: Any,
    ) -> dict[str, Outcome]:
        """Compare, print a table and record a line for each contender.

        Args:
            scenario, model, case: what is measured.
            starts: for each name the contender whose memory it takes, if any, and what begins its trial.
            unit: of the values.
            rounds: turns of each.
            base: whom ratios refer to.
            note: a few words on what a trial's facts say.
            workload: more fields for the records.
        """
        fitting, skipped = self._fitting(case, {name: c for name, (c, _) in starts.items()})
        together = self._fits(case, [starts[name][0] for name in fitting])
        left = max(self.settings.deadline - time.monotonic(), 5.0)
        found = compare(
            {name: starts[name][1] for name in fitting},
            rounds=rounds,
            together=together,
            allowance=min(60.0, left / max(len(fitting), 1)),
            tell=lambda text: self.tell(text and f"{scenario}, {case.context:,} tokens, {text}"),
        )
        outcomes = {name: found.get(name) or skipped[name] for name in starts}
        workload = {
            "model": models.label(model),
            "dtype": str(case.geometry.dtype).removeprefix("torch."),
            "context": case.context,
            "batch": 1,
            "block_size": case.block_size,
            "kv_bytes": case.kv_bytes,
        } | workload
        title = f"{scenario} · {workload['model']} · {workload['dtype']} · {case.context:,} tokens"
        self._print(title, unit, outcomes, base, note)
        self._record(scenario, unit, outcomes, base, workload)
        return outcomes

    def compare_plain(
        self,
        scenario: str,
        title: str,
        starts: Mapping[str, Start],
        *,
        unit: str,
        rounds: int,
        base: str,
        workload: dict[str, Any],
    ) -> dict[str, Outcome]:
        """Compare what needs no model and no cache; print a table and record a line for each contender."""
        outcomes = compare(
            starts,
            rounds=rounds,
            together=True,
            allowance=60.0,
            tell=lambda text: self.tell(text and f"{scenario}, {title}, {text}"),
        )
        self._print(f"{scenario} · {title}", unit, outcomes, base, lambda facts: "")
        self._record(scenario, unit, outcomes, base, workload)
        return outcomes

    def _record(
        self, scenario: str, unit: str, outcomes: Mapping[str, Outcome], base: str, workload: dict[str, Any]
    ) -> None:
        for name, outcome in outcomes.items():
            ratio = outcome.ratio(outcomes[base]) if base in outcomes else None
            self._recorder.add(
                scenario,
                contender=name,
                status=outcome.status,
                unit=unit,
                **({"reason": outcome.reason} if outcome.reason else {}),
                **(Spread.of(list(outcome.values.values())).fields() if outcome.values else {"n": 0}),
                ratio=None if ratio is None else {"to": base} | ratio.fields(),
                workload=workload,
                facts=outcome.facts,
            )
            self.failed += outcome.status == "failed"

    def _fitting(self, case: Case, contenders: Mapping[str, Contender | None]) -> tuple[list[str], dict[str, Outcome]]:
        """Who fits into memory alone; and an outcome for those who do not."""
        names, skipped = [], {}
        for name, one in contenders.items():
            if self._fits(case, [one]):
                names.append(name)
            else:
                skipped[name] = Outcome(status="skipped", reason=f"{size(case.kv_bytes)} of KV do not fit here")
        return names, skipped

    @staticmethod
    def _fits(case: Case, contenders: Sequence[Contender | None]) -> bool:
        known = [c for c in contenders if c is not None]
        # All layers are filled from the keys and values of one.
        source = case.kv_bytes / case.geometry.layers * 2
        device = sum(c.device_share for c in known) * case.kv_bytes + source
        host = sum(c.host_share for c in known) * case.kv_bytes
        if case.device.type != "cuda":
            return device + host < 0.7 * free_host_memory()
        return device < 0.85 * torch.cuda.mem_get_info(case.device)[0] and host < 0.7 * free_host_memory()

    # Showing

    def tell(self, text: str) -> None:
        """Show what is going on, on a terminal in a line that is overwritten."""
        if self.settings.terminal:
            print("\r" + text.ljust(self._line), end="\r" if not text else "", flush=True)
            self._line = len(text)

    def _print(
        self,
        title: str,
        unit: str,
        outcomes: Mapping[str, Outcome],
        base: str,
        note: Callable[[dict[str, Any]], str],
    ) -> None:
        rows = []
        for name, outcome in outcomes.items():
            if not outcome.values:
                rows.append([name, "-", "", "-", "", short(f"{outcome.status}: {outcome.reason}")])
                continue
            spread = Spread.of(list(outcome.values.values()))
            ratio = outcome.ratio(outcomes[base]) if base in outcomes else None
            ratios = ["-", ""] if ratio is None else [f"{ratio.median:.2f}", f"{ratio.low:.2f} .. {ratio.high:.2f}"]
            rows.append([name, number(spread.median), str(spread), *ratios, note(outcome.facts)])
        print(title)
        print(table(["", unit, "min .. max", f"x {base}", "min .. max", ""], rows))
        print(flush=True)


def free_host_memory() -> int:
    """Bytes of host memory that are free; a guess where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30
