"""What a scenario works with: the command line, the models, and comparisons that are printed and recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import models, sessions, trees
from benchmarks.contenders import BASELINE, Case, Contender, contender
from benchmarks.cores import limited_to
from benchmarks.models import Geometry
from benchmarks.records import ROOT, Recorder, number, short, size, table, versions
from benchmarks.trees import Process, Tree
from benchmarks.turns import Outcome, Spread, Start, TrialEnded, broken, compare, release_memory
from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.memory.storage.system import free_host_memory

Note = Callable[[dict[str, Any]], str]
Bases = str | Mapping[str, str]
#: A case that has begun may begin further turns until LATE seconds after the deadline.
LATE = 15.0


@dataclass(frozen=True)
class Settings:
    """The command line. None and 0 leave the choice to the scenario.

    Attributes:
        model, contexts, contenders, rounds, new_tokens, block_size: what to measure, and how often.
        cases: parts of the scenarios to run; None: all.
        batch: sequences that decode together.
        against: another source tree whose tiered caches are measured as well.
        device, dtype: where and in what.
        quick: small sizes, to see that everything runs.
        deadline: `time.monotonic()` at which no further case begins.
        emulated: mark records as made on an emulated device.
        terminal: show progress.
        trace: a file of requests, for scenarios that replay one.
    """

    model: str | None
    contexts: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int
    new_tokens: int
    block_size: int
    cases: tuple[str, ...] | None
    batch: int
    against: Tree | None
    device: torch.device
    dtype: torch.dtype
    out: Path
    quick: bool
    deadline: float
    emulated: bool
    terminal: bool
    trace: Path | None = None


class Bench:
    """What a scenario works with: the settings, the model, comparisons that are printed and recorded.

    Attributes:
        settings: the command line.
        failed: how many contenders failed so far. A budget that is too small is a finding, not a failure.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.failed = 0
        self._recorder = Recorder(
            settings.out, settings.device, emulated=settings.emulated, **computing(settings.device)
        )
        self._models: dict[str, PreTrainedModel] = {}
        self._line = 0
        self._this = Tree.at(ROOT) if settings.against else None
        self._processes: dict[tuple[Tree, str, int], Process] = {}
        self._tree_fields: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        """End the processes of source trees."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

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

    def selected(self, name: str) -> bool:
        """Whether this part of a scenario, one of its `CASES`, is asked for."""
        return self.settings.cases is None or name in self.settings.cases

    def model(self, name: str) -> PreTrainedModel:
        """A model, loaded once; the one before it is dropped."""
        if name not in self._models:
            self._models.clear()
            release_memory()
            self.progress(f"loading {models.label(name)}")
            self._models[name] = models.load(name, self.settings.device, self.settings.dtype)
        return self._models[name]

    def contenders(self, *usual: str) -> list[Contender]:
        """`--contenders`, or what is usual."""
        return [contender(name) for name in self.settings.contenders or usual]

    def trees(self, one: Contender) -> list[Tree | None]:
        """Of which source trees a contender is measured: None is this one, in this process."""
        against = self.settings.against
        if against is None:
            return [None]
        return [self._this, against] if one.tiered else [self._this]

    def name_in(self, one: Contender, tree: Tree | None) -> str:
        """The name of a contender of a tree."""
        return f"{one.name} of {tree}" if tree is not None and tree is self.settings.against else one.name

    def start(
        self, name: str, kind: str, model: str, one: Contender, tree: Tree | None, case: Case, tokens: int
    ) -> Start:
        """What begins a trial of a contender, a session of that kind (see `sessions`); of a tree, in another process.

        Processes are started and models loaded here, so that their memory is in use before the harness looks how
        much is free. `name` is the contender's in the records, which say what tree it is of.
        """
        with_model = kind in sessions.WITH_MODEL
        if tree is None:
            return partial(sessions.session, kind, one, case, tokens, self.model(model) if with_model else None)
        try:
            process = self._process(tree, one.name)
            if with_model:
                self.progress(f"loading {models.label(model)} for {self.name_in(one, tree)}")
                process.ask("load", model=model, device=str(case.device), dtype=dtype_name(case.geometry.dtype))
        except TrialEnded as error:
            self._tree_fields[name] = tree.fields()
            return partial(_raise, error)
        found = dict(process.computing)
        self._tree_fields[name] = tree.fields() | {"versions": {**versions(), "kvtier": found.pop("kvtier")}} | found
        return partial(process.trial, kind, one.name, tokens, trees.described(model, case))

    def starts(
        self, kind: str, model: str, case: Case, tokens: int, *usual: str
    ) -> dict[str, tuple[Contender | None, Start]]:
        """What begins the trials of `--contenders`, or of the usual ones; with `--against`, of both trees."""
        found: dict[str, tuple[Contender | None, Start]] = {}
        for one in self.contenders(*usual):
            for tree in self.trees(one):
                name = self.name_in(one, tree)
                found[name] = (one, self.start(name, kind, model, one, tree, case, tokens))
        return found

    def bases(self, names: Iterable[str]) -> Bases:
        """What ratios refer to: DynamicCache; with `--against`, for this tree's caches those of the other."""
        if self.settings.against is None:
            return BASELINE
        names = list(names)
        others = {name: f"{name} of {self.settings.against}" for name in names}
        return {name: other if other in names else BASELINE for name, other in others.items()}

    def _process(self, tree: Tree, name: str) -> Process:
        threads = torch.get_num_threads()
        key = (tree, name, threads)
        if key not in self._processes or not self._processes[key].running:
            self.progress(f"starting a process for {name} of {tree}")
            cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            self._processes[key] = Process(tree, threads, cudnn_attention=cudnn)
        return self._processes[key]

    def cases(self, scenario: str, model: str, usual: Sequence[int], new_tokens: int) -> Iterator[Case]:
        """One case for each context, as long as there is time. What is not reached is recorded as such."""
        settings = self.settings
        contexts = settings.contexts or (tuple(usual[:2]) if settings.quick else tuple(usual))
        config = models.config_of(model)
        geometry = Geometry.of(config, settings.dtype)
        for context in contexts:
            title = f"{scenario} · {models.label(model)} · {context:,} tokens"
            if self.in_time(scenario, title, {"model": models.label(model), "context": context}):
                yield Case(config, geometry, settings.device, context, new_tokens, settings.block_size, settings.batch)

    def in_time(self, scenario: str, title: str, workload: Mapping[str, Any]) -> bool:
        """Whether another case may begin. If not, that is said and recorded."""
        if time.monotonic() < self.settings.deadline:
            return True
        print(f"{title}: not reached in time", flush=True)
        self._recorder.add(scenario, status="not reached in time", workload=dict(workload))
        return False

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
        base: Bases = BASELINE,
        note: Note = lambda facts: "",
        each: Mapping[str, Mapping[str, Any]] | None = None,
        detail: str = "",
        together: bool = True,
        **workload: Any,
    ) -> dict[str, Outcome]:
        """Compare, print a table and record a line for each contender.

        Args:
            scenario, model, case: what is measured.
            starts: for each name the contender whose memory it takes, if any, and what begins its trial.
            unit: of the values.
            rounds: turns of each.
            base: the contender that ratios refer to; or, for each name, the one that its ratio refers to.
            note: a short remark for the table, from a trial's facts.
            each: fields of the workload in which single contenders differ.
            detail: for the table's title, what case this is.
            together: whether all contenders keep their caches from turn to turn, if they fit into memory.
            workload: more fields for the records.
        """
        workload = {
            "model": models.label(model),
            "dtype": dtype_name(case.geometry.dtype),
            "context": case.context,
            "batch": case.batch,
            "block_size": case.block_size,
            "layers": case.geometry.layers,
            "kv_bytes": case.kv_bytes,
            "token_bytes": case.batch * case.geometry.kv_bytes(1),
        } | workload
        fitting, skipped = self._fitting(case, {name: c for name, (c, _) in starts.items()})
        together = together and self._fits(case, [starts[name][0] for name in fitting])
        left = max(self.settings.deadline - time.monotonic(), 5.0)
        # Host attention may use more threads than torch: on a CPU model they share the cores that all contenders have.
        with limited_to(torch.get_num_threads()) if case.device.type == "cpu" else contextlib.nullcontext():
            found = compare(
                {name: starts[name][1] for name in fitting},
                rounds=rounds,
                together=together,
                allowance=min(60.0, left / max(len(fitting), 1)),
                progress=lambda text: self.progress(text and f"{scenario}, {case.context:,} tokens, {text}"),
                until=self.settings.deadline + LATE,
                on_turn=self._keep_turns(scenario, unit, workload),
            )
        outcomes = {name: found.get(name) or skipped[name] for name in starts}
        rows = f"{case.batch} x " if case.batch > 1 else ""
        title = f"{scenario} · {workload['model']} · {workload['dtype']} · {rows}{case.context:,} tokens"
        self._print(f"{title} · {detail}" if detail else title, unit, outcomes, base, note)
        self._record(scenario, unit, outcomes, base, workload, each or {})
        return outcomes

    def compare_plain(
        self,
        scenario: str,
        title: str,
        starts: Mapping[str, Start],
        *,
        unit: str,
        rounds: int,
        base: Bases,
        workload: dict[str, Any],
        note: Note = lambda facts: "",
        each: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Outcome]:
        """Compare what needs no model and no cache; print a table and record a line for each contender.

        Once time is up, it only says so, and returns nothing.
        """
        if not self.in_time(scenario, f"{scenario} · {title}", workload):
            return {}
        outcomes = compare(
            starts,
            rounds=rounds,
            together=True,
            allowance=60.0,
            progress=lambda text: self.progress(text and f"{scenario}, {title}, {text}"),
            until=self.settings.deadline + LATE,
            on_turn=self._keep_turns(scenario, unit, workload),
        )
        self._print(f"{scenario} · {title}", unit, outcomes, base, note)
        self._record(scenario, unit, outcomes, base, workload, each or {})
        return outcomes

    def record(self, scenario: str, **fields: Any) -> None:
        """Append a record that is no turn's: what was found over several comparisons."""
        self._recorder.add(scenario, status="ok", **fields)

    def fail(self, scenario: str, contender: str, error: Exception, *, unit: str, workload: Mapping[str, Any]) -> None:
        """Record that one of several did not end well: the next ones are measured all the same.

        Raises:
            Exception: the error, where the device answers no more.
        """
        outcome = Outcome()
        outcome.end(error)
        print(f"{scenario} · {contender}: {outcome.status}: {outcome.reason}", flush=True)
        self._recorder.add(
            scenario,
            contender=contender,
            status=outcome.status,
            reason=outcome.reason,
            unit=unit,
            n=0,
            ratio=None,
            workload=dict(workload),
            facts={},
        )
        self.failed += outcome.status == "failed"
        if broken():
            raise error
        release_memory()

    def _keep_turns(self, scenario: str, unit: str, workload: Mapping[str, Any]) -> Callable[[str, int, Outcome], None]:
        """What keeps each turn as soon as it is made. Once all have their record, `_record` drops them."""
        self._recorder.begin_turns(scenario)

        def keep(name: str, turn: int, outcome: Outcome) -> None:
            value = outcome.values[turn]
            fields = {"unit": unit, "value": value, "workload": dict(workload), "facts": outcome.facts}
            self._recorder.turn(scenario, contender=name, turn=turn, **fields)

        return keep

    def _record(
        self,
        scenario: str,
        unit: str,
        outcomes: Mapping[str, Outcome],
        base: Bases,
        workload: dict[str, Any],
        each: Mapping[str, Mapping[str, Any]],
    ) -> None:
        for name, outcome in outcomes.items():
            to = _base_of(base, name)
            ratio = outcome.ratio(outcomes[to]) if to in outcomes else None
            self._recorder.add(
                scenario,
                contender=name,
                status=outcome.status,
                unit=unit,
                **({"reason": outcome.reason} if outcome.reason else {}),
                **(Spread.of(list(outcome.values.values())).fields() if outcome.values else {"n": 0}),
                rounds={str(turn): value for turn, value in outcome.values.items()},
                ratio=None if ratio is None else {"to": to} | ratio.fields(),
                workload=workload | dict(each.get(name, {})),
                facts=outcome.facts,
                **self._tree_fields.get(name, {}),
            )
            self.failed += outcome.status == "failed"
        self._recorder.drop_turns(scenario)

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

    def progress(self, text: str) -> None:
        """Show what is going on, on a terminal in a line that is overwritten."""
        if self.settings.terminal:
            print("\r" + text.ljust(self._line), end="\r" if not text else "", flush=True)
            self._line = len(text)

    def _print(self, title: str, unit: str, outcomes: Mapping[str, Outcome], base: Bases, note: Note) -> None:
        rows = []
        for name, outcome in outcomes.items():
            if not outcome.values:
                why = ": ".join(filter(None, (outcome.status, outcome.reason)))
                rows.append([name, "-", "", "-", "", short(why)])
                continue
            spread = Spread.of(list(outcome.values.values()))
            to = _base_of(base, name)
            ratio = outcome.ratio(outcomes[to]) if to in outcomes else None
            ratios = ["-", ""] if ratio is None else [f"{ratio.median:.2f}", f"{ratio.low:.2f} .. {ratio.high:.2f}"]
            if ratio is not None and not isinstance(base, str):
                ratios[0] += f" x {to}"
            rows.append([name, number(spread.median), str(spread), *ratios, note(outcome.facts)])
        print(title)
        ratio_header = f"x {base}" if isinstance(base, str) else "ratio"
        print(table(["", unit, "min .. max", ratio_header, "min .. max", ""], rows))
        print(flush=True)


def _raise(error: Exception) -> Any:
    raise error


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def _base_of(base: Bases, name: str) -> str:
    return base if isinstance(base, str) else base[name]


def computing(device: torch.device) -> dict[str, Any]:
    """Which code computes here, for records: nothing that stands in for another may pass for it.

    Raises:
        ConfigError: an environment variable asks for what there is not.
    """
    return {
        "kernels": "triton" if launch.available(device) else "torch",
        "instruction_set": native.instruction_set() if native.available() else None,
        "cudnn_attention": device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled(),
    }
