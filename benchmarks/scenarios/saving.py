"""What saving ahead costs a store whose memory is full: with a directory, and the same without one.

Conversations take turns in an order that is drawn, on a host budget that their keys and values exceed 1.8 times. With a
directory, every turn is saved by a thread while the next one computes, and what gave up its room is loaded, or computed
again where that is expected sooner; without one, it is computed again. Both stores get the same turns, a round each
in alternation; what of a round is not saved at its end is saved before the other store's round, outside of the times.
A round ends with conversations that begin: nothing of them can be re-used, so that saving can only cost there.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
import time
from typing import Any

import torch

import kvtier
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.models import Geometry, config_of, label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier.conversation.calls.reuse import StoreStats

SUMMARY = "what saving ahead costs a store whose memory is full: time to the first token, and decode"
MODEL, NAME = "examples/pylm", "saving"
#: Conversations, tokens that each begins with, and new tokens and decoded ones of a turn.
CONVERSATIONS, HISTORY, NEW, DECODED = 12, 1536, 48, 24
ROUNDS = 12
#: New conversations of a round.
BEGIN = 4
#: What is kept of all conversations when the rounds begin, against the host's budget.
LIVE = 1.8
WAYS = ("saved", "not saved")
KINDS = ("turns", "beginnings")

#: Seconds to the first token, seconds of each later one, part of the prompt that was re-used.
Turn = tuple[float, float, float]
#: Rounds by kind and way.
Found = dict[tuple[str, str], list[list[Turn]]]


class Clock:
    """Notes when each token is known: a stopping criterion that stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See Transformers."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def run(bench: Bench) -> None:
    """Run the scenario."""
    name = bench.settings.model or MODEL
    with torch_threads(1), tempfile.TemporaryDirectory() as folder:
        measure(bench, name, folder)


def measure(bench: Bench, name: str, folder: str) -> None:
    """Both stores in alternation; print and record the figures."""
    model, device = bench.model(name), bench.settings.device
    vocabulary = model.config.vocab_size
    conversations, rounds = CONVERSATIONS, bench.rounds(ROUNDS)
    geometry = Geometry.of(config_of(name), bench.settings.dtype)
    budget = int(geometry.kv_bytes(conversations * HISTORY) / LIVE)
    stores = {
        "saved": kvtier.ConversationStore(model, host_budget=budget, directory=folder),
        # A model of its own: what each store learns of how long a prefill takes comes from its own forwards alone.
        "not saved": kvtier.ConversationStore(copy.deepcopy(model), host_budget=budget),
    }
    draw = torch.Generator("cpu").manual_seed(0)

    def some(tokens: int) -> torch.Tensor:
        return torch.randint(5, vocabulary, (1, tokens), generator=draw).to(device)

    begin = [some(HISTORY - DECODED) for _ in range(conversations)]
    histories: dict[str, list[torch.Tensor]] = {way: [] for way in WAYS}

    def turn(way: str, i: int, new: torch.Tensor) -> Turn:
        """One turn of a conversation; all of it, if there is none of this number yet."""
        history = histories[way]
        ids = new if i == len(history) else torch.cat([history[i], new], 1)
        clock, store = Clock(), stores[way]
        began = time.perf_counter()
        out = store.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=[clock],
            max_new_tokens=DECODED,
            min_new_tokens=DECODED,
            do_sample=False,
        )
        history[i : i + 1] = [out]
        first = clock.times[0] - began
        return first, (clock.times[-1] - clock.times[0]) / (DECODED - 1), store.reuse[0].cached / ids.shape[1]

    try:
        for way in WAYS:
            for i in range(conversations):
                bench.progress(f"{NAME}: {way}, conversation {i + 1} of {conversations} begins")
                turn(way, i, begin[i])
            stores[way].flush()
        order = random.Random(0)
        found: Found = {(kind, way): [] for kind in KINDS for way in WAYS}
        for number_ in range(rounds):
            turns = [(order.randrange(conversations), some(NEW)) for _ in range(conversations)]
            made = len(histories["saved"])
            others = [(made + i, some(HISTORY - DECODED)) for i in range(BEGIN)]
            # Which is first changes from round to round.
            for way in WAYS if number_ % 2 else WAYS[::-1]:
                bench.progress(f"{NAME}: round {number_ + 1} of {rounds}, {way}")
                for kind, those in zip(KINDS, (turns, others), strict=True):
                    found[kind, way].append([turn(way, i, new) for i, new in those])
                stores[way].flush()
        same = all(torch.equal(a, b) for a, b in zip(*histories.values(), strict=True))
        stats = {way: stores[way].stats for way in WAYS}
    finally:
        for store in stores.values():
            store.close()
    bench.progress("")
    report(bench, name, budget, found, stats, same)


def report(bench: Bench, name: str, budget: int, found: Found, stats: dict[str, StoreStats], same: bool) -> None:
    """A table, targets and records. A round's figure is the mean of its turns; ratios are of rounds of equal turns."""
    rounds = found["turns", "saved"]
    workload = {
        "model": label(name),
        "conversations": len(rounds[0]),
        "history": HISTORY,
        "new_tokens": NEW,
        "decoded": DECODED,
        "host_budget": budget,
        "live": LIVE,
        "rounds": len(rounds),
    }
    rows, targets = [], []
    for kind in KINDS:
        for column, what in enumerate(("time to the first token", "decode, each token")):
            means = {way: [statistics.mean(t[column] for t in turns) for turns in found[kind, way]] for way in WAYS}
            ratios = sorted(b / a for a, b in zip(*means.values(), strict=True))
            ratio = statistics.median(ratios)
            for way, times in means.items():
                median, low, high = statistics.median(times), min(times), max(times)
                of = statistics.mean(t[2] for turns in found[kind, way] for t in turns)
                facts: dict[str, Any] = {"low": low, "high": high, "reused": of}
                facts |= {"saved_bytes": stats[way].saved_bytes, "problem": stats[way].problem, "same_tokens": same}
                spread = ""
                if way == "saved":
                    facts |= {"ratio_low": ratios[0], "ratio_high": ratios[-1]}
                    spread = f"{number(ratio)} ({number(ratios[0])} .. {number(ratios[-1])})"
                bench.record(
                    NAME,
                    contender=way,
                    workload={**workload, "figure": f"{kind}: {what}"},
                    unit="s",
                    median=median,
                    n=len(times),
                    ratio=ratio if way == "saved" else None,
                    facts=facts,
                )
                cells = [f"{number(low)} .. {number(high)}", f"{100 * of:.0f}%", spread]
                rows.append([f"{kind}: {what}, {way}", number(median), *cells])
            targets.append(Target(f"{kind}: {what}: speed x no saving", ratio, ">=", 0.98))
    print(f"{NAME} · {label(name)} · {workload['conversations']} conversations, {LIVE} x the host budget of {budget:,}")
    print(table(["", "seconds", "low .. high", "re-used", "speed x no saving (rounds)"], rows, left=(0,)))
    print(f"the same tokens: {'yes' if same else 'no'}; saved: {stats['saved'].saved_bytes:,} bytes")
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
