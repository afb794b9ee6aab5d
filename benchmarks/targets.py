"""The performance targets of a GPU run: each is one figure, computed from the records of the run, and its limit."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import number, table
from benchmarks.scenarios.kernels import COPY
from kvtier.config import DEVICE_BLOCK

Record = Mapping[str, Any]

_SENSES = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
#: Of fetches, as a share of what the link carries in a step with everything resident: below, they hide behind it.
HIDDEN = 0.8
LEAST_COPY = 256 * 2**10


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        name: what the figure is.
        figure: from the records; None if they lack it.
        sense: `>=`, `>` or `<=`.
        limit: of the figure.
    """

    name: str
    figure: float | None
    sense: str
    limit: float

    @property
    def verdict(self) -> str:
        """`met`, `missed` or `no figure`."""
        if self.figure is None:
            return "no figure"
        return "met" if _SENSES[self.sense](self.figure, self.limit) else "missed"

    def fields(self) -> dict[str, Any]:
        """For a record."""
        return {
            "target": self.name,
            "figure": self.figure,
            "limit": f"{self.sense} {self.limit:g}",
            "verdict": self.verdict,
        }


def evaluate(records: Sequence[Record]) -> list[Target]:
    """All targets. Where several records concern one target, the worst counts."""
    return [*_kernels(records), *_resident(records), *_copies(records), *_spilled(records), *_caches(records)]


def table_of(found: Sequence[Target]) -> str:
    """A line for each."""
    rows = []
    for target in found:
        figure = "-" if target.figure is None else number(target.figure)
        rows.append([target.name, figure, f"{target.sense} {target.limit:g}", target.verdict])
    return table(["target", "figure", "limit", ""], rows, left=(0, 2, 3), indent="")


# Each


def _kernels(records: Sequence[Record]) -> Iterator[Target]:
    shape = {"context": 32768, "batch": 1, "queries": 1, "heads": 32, "kv_heads": 8, "block_size": DEVICE_BLOCK}
    paged = _last(records, "kernels", "paged", **shape)
    copy = _last(records, "kernels", COPY, **shape)
    yield Target("paged decode at 32k, of a copy's GB/s on the device", _ratio(paged, copy), ">=", 0.8)


def _resident(records: Sequence[Record]) -> Iterator[Target]:
    for context, sense in ((8, ">="), (32, ">"), (64, ">")):
        figure = _against(records, context, "kvtier@100%", "dynamic")
        yield Target(f"all resident at {context}k, tokens/s of dynamic", figure, sense, 1.0)


def _copies(records: Sequence[Record]) -> Iterator[Target]:
    for word in ("fetch", "write back"):
        best = _link(records, word)
        by_size: dict[int, list[float]] = {}
        for record in _all(records, "link", f"{word}, chosen"):
            if record["workload"].get("chunk_bytes", 0) >= LEAST_COPY:
                by_size.setdefault(record["workload"]["chunk_bytes"], []).append(record["median"])
        figure = _quotient(_least(max(some) for some in by_size.values()), best)
        yield Target(f"{word} blocks of 256 KiB and more, of the link's best GB/s", figure, ">=", 0.9)
    # The counters count runs of neighbouring slots, whether the copy engine or a launch moves them.
    runs = _most(
        _quotient(r["facts"].get("copies_up_per_token"), r["workload"].get("layers"))
        for r in _all(records, "decode", r"fetch@.*")
    )
    yield Target("runs fetched per layer and token (launches are fewer)", runs, "<=", 8)
    down = []
    for r in _all(records, "decode", r"(kvtier|fetch)@.*"):
        written = r["facts"].get("bytes_down_per_token")
        if written is not None:
            late = r["facts"].get("backlog_bytes_per_token") or 0
            down.append(_quotient(written - late, r["workload"].get("token_bytes")))
    yield Target("bytes written back but for a backlog, of the new tokens' KV", _most(down), "<=", 1.05)


def _spilled(records: Sequence[Record]) -> Iterator[Target]:
    link, host = _link(records, "fetch"), _host(records)
    hidden, steps = [], []
    for record in _all(records, "decode", r"(kvtier|fetch)@.*"):
        workload, facts = record["workload"], record["facts"]
        same = {"model": workload.get("model"), "context": workload.get("context")}
        resident = _last(records, "decode", "kvtier@100%", **same)
        if resident is None or record["contender"] == "kvtier@100%" or not link:
            continue
        step, shortest = (_quotient(workload.get("batch", 1), x["median"]) for x in (record, resident))
        if step is None or shortest is None:
            continue
        fetched = facts.get("bytes_up_per_token")
        if record["contender"].startswith("fetch") and fetched and fetched < HIDDEN * link * 1e9 * shortest:
            hidden.append(_ratio(record, resident))
        if record["contender"].startswith("kvtier") and host and facts.get("host_bytes"):
            steps.append(_quotient(step, max(shortest, facts["host_bytes"] / (link + host) / 1e9)))
    name = f"fetches below {HIDDEN:.0%} of what the link carries in a step, tokens/s of all resident"
    yield Target(name, _least(hidden), ">=", 0.97)
    for share, fetching, attending in (("6.25%", 1.25, 2.5), ("50%", 2.0, 4.0)):
        for way, limit, word in (("fetch", fetching, "fetching only"), ("kvtier", attending, "with host attention")):
            figure = _against(records, 64, f"{way}@{share}", "offloaded")
            yield Target(f"{share} at 64k, {word}, tokens/s of offloaded", figure, ">=", limit)
    name = "a step, of the longer of all resident and host bytes / (link + host attention)"
    yield Target(name, _most(steps), "<=", 1.15)


def _caches(records: Sequence[Record]) -> Iterator[Target]:
    update = _last(records, "update", "kvtier@100%")
    issue = update["facts"].get("issue_us_per_layer") if update else None
    yield Target("Python per layer and step, us", issue, "<=", 30)
    memory = [r for r in _all(records, "memory", r"(kvtier|fetch)@.*") if r["workload"].get("peak_of") == "device"]
    peak = _most(_quotient(r["facts"].get("peak_bytes"), r["facts"].get("device_budget")) for r in memory)
    yield Target("peak of device memory, of the budget", peak, "<=", 1.02)
    locked = _most(_quotient(r["facts"].get("page_locked_bytes"), r["facts"].get("kv_bytes")) for r in memory)
    yield Target("page-locked bytes, of the KV", locked, "<=", 1.1)


# From records


def _all(records: Sequence[Record], scenario: str, contender: str, **workload: Any) -> list[Record]:
    """The records that have a median, also of comparisons that were cut off; `contender` is a pattern."""
    return [
        r
        for r in records
        if r["scenario"] == scenario
        and r.get("status") in ("ok", "cut off")
        and r.get("median") is not None
        and not r["workload"].get("summary")
        and re.fullmatch(contender, r.get("contender", ""))
        and all(r["workload"].get(name) == value for name, value in workload.items())
    ]


def _last(records: Sequence[Record], scenario: str, contender: str, **workload: Any) -> Record | None:
    found = _all(records, scenario, re.escape(contender), **workload)
    return found[-1] if found else None


def _against(records: Sequence[Record], context: int, contender: str, base: str) -> float | None:
    """Ratio of Llama's decode speeds at `context` x 1024 tokens."""
    workload = {"model": "llama-3.1-8b", "context": context * 1024}
    return _ratio(*(_last(records, "decode", name, **workload) for name in (contender, base)))


def _link(records: Sequence[Record], word: str) -> float | None:
    """The most GB/s of plain copies in one direction."""
    return _most(r["median"] for r in _all(records, "link", word + r" [\d.,]+ [KMG]iB"))


def _host(records: Sequence[Record]) -> float | None:
    """GB/s of attention on the host."""
    return _most(r["median"] for r in _all(records, "host", "kvtier"))


def _ratio(one: Record | None, other: Record | None) -> float | None:
    """Of two records: the median of the ratios within rounds, of the medians where no round has both."""
    if one is None or other is None:
        return None
    values, bases = one.get("rounds", {}), other.get("rounds", {})
    within = [values[i] / bases[i] for i in values if bases.get(i)]
    return statistics.median(within) if within else _quotient(one["median"], other["median"])


def _quotient(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else x / y


def _most(values: Iterable[float | None]) -> float | None:
    return max((x for x in values if x is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((x for x in values if x is not None), default=None)
