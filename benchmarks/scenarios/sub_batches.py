"""Milliseconds of an engine's step in one forward, and in two that take turns, against the makespan that is predicted.

An emulated device computes in stated seconds while host threads really attend, at a stated rate (`kvtier.testing`), as
in the scenario `planner`; a prediction is made from these numbers alone. Both ways take turns, each with an engine and
a memory of its own. Of host attention that part is hidden by which the seconds of both are more than those of the step.

decode   eight sequences decode, all but some tokens of each on the host
mixed    two sequences are on the device, six on the host (policy "neo")
prompts  the same, while each step computes a part of a prompt as well
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier import Engine, TieredMemory
from kvtier.planning.sub_batches import Choice, Rates, Row, choose
from kvtier.serving.runners import turns
from kvtier.testing import Throttled, emulated_device, throttled, with_doubles

SUMMARY = "ms of an engine's step in one forward and in two that take turns, with an emulated device (CPU only)"
MODEL = "llama-6x32"
CASES = ("decode", "mixed", "prompts")
#: Sequences, tokens of each, tokens of a block, and of a part of a prompt: few, for the thread really computes them.
SEQUENCES, CONTEXT, BLOCK, PART = 8, 1024, 64, 16
#: Bytes per second of the link and of the device, seconds of a copy.
LINK, DEVICE, LATENCY = 1e9, 20e9, 20e-6
#: Steps before the first turn and of a turn; turns.
SETTLE, STEPS, ROUNDS = 3, 12, 3


@dataclass(frozen=True)
class Load:
    """What an engine does, and on what.

    Attributes:
        on_device: share of the KV that the device budget holds.
        policy: that places blocks.
        linear: seconds of a layer for few tokens, and more for each token.
        host: bytes per second.
        prompts: whether each step computes a part of a prompt.
    """

    on_device: float
    policy: str
    linear: tuple[float, float]
    host: float
    prompts: bool = False

    def seconds(self, tokens: int) -> float:
        """Of a layer besides attention."""
        return self.linear[0] + self.linear[1] * tokens


LOADS = {
    "decode": Load(0.1, "default", (6e-3, 0.0), 0.32e9),
    "mixed": Load(0.3, "neo", (6e-3, 0.0), 0.26e9),
    "prompts": Load(0.3, "neo", (4e-3, 0.6e-3), 0.22e9, prompts=True),
}


@dataclass
class Given:
    """In place of what an engine learns: what is stated, so that a prediction is no fit to what it predicts.

    Attributes:
        predicted: for each step, seconds by way.
    """

    rates: Rates
    apart: bool
    predicted: list[dict[str, float]] = field(default_factory=list)
    known = True
    factor = 1.0

    def choose(self, rows: list[Row]) -> Choice:
        """How a step is computed."""
        choice = choose(rows, self.rates)
        self.predicted.append({name: seconds for name, (_, seconds) in choice.others.items()})
        return choice


class Session:
    """An engine with full sequences on an emulated machine."""

    def __init__(self, load: Load, model: PreTrainedModel, apart: bool) -> None:
        self.load, self.model = load, model
        self.busy = self.overlap = 0.0
        config = model.config
        layers = config.num_hidden_layers
        token = 2 * config.num_key_value_heads * config.head_dim * 4 * layers
        total = SEQUENCES * (CONTEXT + 4 * BLOCK) * token
        self.machine: Throttled = throttled(LINK, latency=LATENCY, host=load.host)
        self.memory = TieredMemory(
            device_budget=int(load.on_device * total) + 8 * PART * token,
            host_budget=4 * total,
            policy=load.policy,
            audit="off",
        )
        with_doubles(self.memory, self.machine, poison=False)
        self.engine = Engine(
            model,
            memory=self.memory,
            block_size=BLOCK,
            max_batch_tokens=2048,
            scheduler="fcfs",
            sub_batches=True,
        )
        rates = Rates(layers, load.seconds, device_rate=DEVICE, host_rate=load.host, host_overhead=2 * LATENCY)
        self.given = Given(rates, apart)
        self._decide()
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def _decide(self) -> None:
        runner: Any = self.engine._runner
        decider, given = runner.sub_batches, self.given

        def plan(batch: Any) -> list[int]:
            choice = given.choose(decider._look(batch))
            decider._second = [batch[i][0] for i in choice.second] if given.apart else []
            return list(range(len(batch)))

        decider.plan, decider.took = plan, lambda seconds: None

    def _fill(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.names = []
        for _ in range(SEQUENCES):
            self._add(CONTEXT, draw, most=2 * BLOCK)
        while any(self.engine.output(name).first_token is None for name in self.names):
            self.engine.step()
        if self.load.prompts:  # from now on a part of it in each step
            self.engine._steps.max_tokens = SEQUENCES + PART
            self._add(4 * CONTEXT, draw, most=1)

    def _add(self, tokens: int, draw: torch.Generator, most: int) -> None:
        ids = torch.randint(1, self.model.config.vocab_size, (tokens,), generator=draw).tolist()
        self.names.append(self.engine.add_request(ids, max_new_tokens=most, do_sample=False, eos_token_id=None))

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        found = []
        with emulated_device(self.model, self.machine, linear=self.load.seconds, device_rate=DEVICE) as clock:
            clock.ends, before = 0.0, self.engine._runner.forward.counters.host_seconds
            for _ in range(steps):
                began = time.perf_counter()
                self.engine.step()
                found.append(time.perf_counter() - began)
        hosted = self.engine._runner.forward.counters.host_seconds - before
        self.overlap = max(clock.busy - self.busy + hosted - sum(found), 0.0) / max(hosted, 1e-9)
        self.busy = clock.busy
        return found

    def tokens(self) -> list[list[int]]:
        """What was generated so far."""
        return [list(self.engine.output(name).generated_tokens) for name in self.names[:SEQUENCES]]

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()
        self.memory.close()


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        print("sub_batches: not measured, for a device is emulated on the CPU\n", flush=True)
        return
    if turns.why_not():
        print(f"sub_batches: not measured, for {turns.why_not()}\n", flush=True)
        return
    name = bench.model_names(MODEL)[0]
    model = bench.model(name)
    rows, targets = [], list[Target]()
    with torch_threads(1):
        for case in CASES:
            if bench.selected(case):
                _measure(bench, case, name, model, rows, targets)
    bench.progress("")
    heads = ["load", "forwards", "ms/step", "predicted", "host attention hidden"]
    print(
        f"sub_batches · {label(name)}\n" + table(heads, rows, left=(0, 1)) + "\n\n" + table_of(targets) + "\n",
        flush=True,
    )
    for target in targets:
        bench.record("sub_batches", workload={"model": label(name)}, **target.fields())


def _measure(
    bench: Bench, case: str, name: str, model: PreTrainedModel, rows: list[list[str]], targets: list[Target]
) -> None:
    load, steps = LOADS[case], bench.tokens(STEPS)
    times: dict[bool, list[float]] = {False: [], True: []}
    predicted: dict[bool, list[float]] = {False: [], True: []}
    hidden: dict[bool, list[float]] = {False: [], True: []}
    tokens = []
    for turn in range(bench.rounds(ROUNDS)):
        for apart in (False, True) if turn % 2 == 0 else (True, False):
            bench.progress(f"sub_batches: {case}, {'two forwards' if apart else 'one forward'}, round {turn + 1}")
            session = Session(load, model, apart)
            try:
                session.run(SETTLE)
                session.given.predicted.clear()
                times[apart].append(statistics.median(session.run(steps)))
                way = "sub-batches" if apart else "together"
                predicted[apart].append(statistics.median(each[way] for each in session.given.predicted))
                tokens.append(session.tokens())
                hidden[apart].append(session.overlap)
            finally:
                session.close()
    same = all(each == tokens[0] for each in tokens)
    workload = {
        "case": case,
        "model": label(name),
        "sequences": SEQUENCES,
        "context": CONTEXT,
        "on_device": load.on_device,
        "policy": load.policy,
        "linear": list(load.linear),
        "host_rate": load.host,
        "device_rate": DEVICE,
    }
    for apart in (False, True):
        measured, said = statistics.median(times[apart]), statistics.median(predicted[apart])
        bench.record(
            "sub_batches",
            contender="two forwards" if apart else "one forward",
            workload=workload,
            unit="ms/step",
            median=1e3 * measured,
            n=len(times[apart]),
            spread=[1e3 * min(times[apart]), 1e3 * max(times[apart])],
            predicted=1e3 * said,
            hidden_share=statistics.median(hidden[apart]),
            same_tokens=same,
        )
        rows.append(
            [
                case,
                "two" if apart else "one",
                number(1e3 * measured),
                number(1e3 * said),
                f"{statistics.median(hidden[apart]):.0%}",
            ]
        )
    gain = statistics.median(times[False]) / statistics.median(times[True])
    model_gain = statistics.median(predicted[False]) / statistics.median(predicted[True])
    targets.append(Target(f"{case}: speed of two forwards, x one", gain, ">", 1.0))
    targets.append(Target(f"{case}: gain, off the predicted one by", abs(gain / model_gain - 1), "<=", 0.1))
    targets.append(Target(f"{case}: same tokens", float(same), ">=", 1.0))
