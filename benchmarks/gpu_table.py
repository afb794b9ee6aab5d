"""The tables of a GPU run: every figure a line, those of comparisons that were cut off too; then the targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.records import number, short, size, table


def cut_off(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is left of comparisons that did not end, as records."""
    left: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for turn in turns:
        key = turn["scenario"], json.dumps(turn["workload"], sort_keys=True), turn["contender"]
        left.setdefault(key, []).append(turn)
    found = []
    for some in left.values():
        rounds = {str(turn["turn"]): turn["value"] for turn in some}
        median = statistics.median(rounds.values())
        fields = {"status": "cut off", "n": len(rounds), "median": median, "rounds": rounds, "ratio": None}
        found.append(some[-1] | fields)
    return found


def table_of(records: Sequence[dict[str, Any]]) -> str:
    """Everything that was measured, a line each."""
    rows = []
    before: tuple[str, ...] = ()
    for record in records:
        workload = record.get("workload", {})
        if record["scenario"] in ("build", "calibrate", "tests", "targets") or workload.get("summary"):
            continue
        # Where no model is measured, records have the name of what is.
        names = dict.fromkeys((record["scenario"], workload.get("model", "")))
        group = (" ".join(names).strip(), _context(workload))
        shown = ["", ""] if group == before else list(group)
        before = group
        if "target" in record:  # of a scenario that holds its own figures against some
            figure = "-" if record["figure"] is None else number(record["figure"])
            rows.append([*shown, record["target"], figure, record["limit"], "", record["verdict"]])
            continue
        first = [*shown, record.get("contender", "")]
        if record.get("median") is None:
            note = short(": ".join(filter(None, (record["status"], record.get("reason")))))
            rows.append([*first, "-", "", "", note])
            continue
        ratio = record.get("ratio")
        times = f"{ratio['median']:.2f} x {ratio['to']}" if ratio else ""
        turns = "1 turn" if record["n"] == 1 else f"{record['n']} turns"
        notes = [] if record["status"] == "ok" else [f"{record['status']} after {turns}"]
        notes += _notes({} if "chunk_bytes" in workload and "blocks" not in workload else record["facts"])
        rows.append([*first, number(record["median"]), record["unit"], times, ", ".join(notes)])
    if not rows:
        return "nothing was measured"
    return table(["", "tokens", "", "median", "", "", ""], rows, left=(0, 2, 4, 5, 6), indent="")


def _context(workload: dict[str, Any]) -> str:
    if "chunk_bytes" in workload:  # of blocks that are copied, not tokens
        count = f"{workload['blocks']} x " if "blocks" in workload else ""
        return count + size(workload["chunk_bytes"])
    tokens = f"{workload['context']:,}" if workload.get("context") else ""
    batch = f"{workload['batch']} x " if workload.get("batch", 1) > 1 else ""
    queries = f", {workload['queries']} queries" if workload.get("queries", 1) > 1 else ""
    return batch + tokens + queries


def _notes(facts: dict[str, Any]) -> list[str]:
    notes: list[tuple[str, Callable[[Any], str]]] = [
        ("device_budget", lambda x: f"budget {size(x)}"),
        ("device_peak_bytes", lambda x: f"peak {size(x)}"),
        ("page_locked_bytes", lambda x: f"page-locked {size(x)}"),
        ("issue_us_per_layer", lambda x: f"Python {number(x)} us"),
        ("bytes_up_per_token", lambda x: f"fetched per token {size(x)}"),
        ("chunk_bytes", lambda x: f"{size(x)} a copy"),
        ("launched", lambda x: f"{x} by a launch"),
        ("tile", str),
        ("backend", str),
    ]
    return [show(facts[name]) for name, show in notes if facts.get(name)]
