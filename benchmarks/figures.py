"""Tables and plots of README and docs, made from the committed records.

    python -m benchmarks.figures            write them (`make figures`)
    python -m benchmarks.figures --check    say what is out of date; exit status 1 if anything is

A table stands in a Markdown file between `<!-- figures: NAME -->` and `<!-- end of figures -->`. A plot is an SVG in
`docs/figures/`; `inputs.json` there has a digest of what each was drawn from, for the bytes of a plot depend on the
version of matplotlib. Every figure is taken from `benchmarks/results/`, and every table names the commit and machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import LLAMA_3_1_8B, QWEN3_0_6B
from benchmarks.records import RESULTS, ROOT, number, read, size

#: The machine whose records are published, and others for some scenarios. The first name does not include the
#: family of the processor, as names do now: a new run on that machine writes another file, which is to be named here.
KIND = "cpu-amd-epyc-2c"
_SCENARIOS = {
    "cpu-amd-epyc-family-26-2c": ("host", "hotpath", "overlap", "store_load"),
    "cpu-amd-epyc-family-25-model-17-2c": ("engine", "eviction", "serving_simulated"),
    "cpu-amd-epyc-family-25-model-1-2c": ("serving_measured", "simulated", "store_resume", "sub_batches"),
    "cpu-amd-epyc-family-26-model-2-2c": ("planner", "saving"),
    "cpu-intel-r-xeon-r-processor-family-6-2c": ("store_turns",),
}
#: The machine of the sweep of decode over contexts in bf16; that in fp32, which says what caches hold, is of `KIND`.
SWEPT = "cpu-amd-epyc-family-25-model-17-2c"
KINDS = {scenario: kind for kind, scenarios in _SCENARIOS.items() for scenario in scenarios}
PLOTS = ROOT / "docs" / "figures"
INPUTS = PLOTS / "inputs.json"
PAGES = ("README.md", "docs/benchmarks.md")
SECTION = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
COLOURS = {"kvtier": "#0b7285", "static": "#868e96", "dynamic": "#c92a2a"}
NAMES = {"kvtier": "TieredKVCache", "static": "StaticCache", "dynamic": "DynamicCache"}

Record = dict[str, Any]


def records(scenario: str, *, results: Path = RESULTS, of_kind: str | None = None, **wanted: Any) -> list[Record]:
    """Successful measurements of a scenario on the machine whose records are published, filtered.

    Args:
        scenario: the beginning of the file's name.
        results: the folder of records.
        of_kind: the machine; None: that whose records are published.
        wanted: what the record, its workload or its machine must have under these names.
    """
    found = []
    for record in read(results / f"{scenario}-{of_kind or KINDS.get(scenario, KIND)}.jsonl"):
        facts = record["machine"] | record.get("workload", {}) | {k: v for k, v in record.items() if k != "machine"}
        if record["status"] == "ok" and all(facts.get(name) == value for name, value in wanted.items()):
            found.append(record)
    return found


def newest(found: Iterable[Record]) -> dict[tuple[int, str], Record]:
    """Of each context and contender the record that was made last; summaries of several contexts are left out."""
    chosen: dict[tuple[int, str], Record] = {}
    for record in sorted(found, key=lambda r: r["time"]):
        if not record["workload"].get("summary") and "contender" in record:
            chosen[record["workload"]["context"], record["contender"]] = record
    return chosen


def decode() -> dict[tuple[int, str], Record]:
    """Decode over the context, one thread, bf16: the newest sweep that has all three caches at every context."""
    wanted = {"dtype": "bfloat16", "batch": 1, "threads": 1, "through": "loop", "of_kind": SWEPT}
    return _one_commit("decode", {"dynamic", "kvtier", "static"}, **wanted)


def held() -> dict[tuple[int, str], Record]:
    """What each cache holds over the context, fp32: the newest sweep."""
    return _one_commit("decode", {"dynamic", "kvtier"}, dtype="float32", batch=1, threads=1, through="loop")


def _one_commit(scenario: str, names: set[str], **wanted: Any) -> dict[tuple[int, str], Record]:
    """The newest commit's records that compare all of `names` at three contexts or more."""
    found = [r for r in records(scenario, model="qwen3-0.6b", **wanted) if r.get("contender") in names]
    for commit in dict.fromkeys(r["commit"] for r in sorted(found, key=lambda r: r["time"], reverse=True)):
        chosen = newest(r for r in found if r["commit"] == commit)
        contexts = {context for context, _ in chosen}
        if len(contexts) >= 3 and all((context, name) in chosen for context in contexts for name in names):
            return chosen
    raise LookupError(f"no commit's records of {scenario} compare {', '.join(sorted(names))}")


# ------------------------------------------------------------------------------------------- tables


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def source(found: Iterable[Record], what: str) -> str:
    """The line below a table: what was measured, where, with what, when."""
    listed = list(found)
    commits = ", ".join(dict.fromkeys(f"`{r['commit'][:7]}`" for r in listed))
    machine, versions = listed[0]["machine"], listed[0]["versions"]
    threads = sorted({r["workload"].get("threads", r["machine"]["threads"]) for r in listed})
    counts = sorted({r["n"] for r in listed if "n" in r})
    runs = f"median of {counts[0]} runs" if len(counts) == 1 else f"medians of {counts[0]} to {counts[-1]} runs"
    used = f"{threads[0]} thread" if threads == [1] else f"{' or '.join(map(str, threads))} threads"
    return (
        f"\n{what} {runs[0].upper()}{runs[1:]}, on {machine['cpu']}, {machine['cores']} cores, "
        f"{number(machine['memory_gib'])} GiB, {used}; torch {versions['torch']}, Transformers "
        f"{versions['transformers']}, commit {commits}, {listed[0]['time'][:10]}.\n"
    )


def tokens(count: int) -> str:
    """Tokens for a table."""
    return f"{count:,}"


def gains(contexts: Sequence[int] | None = None) -> str:
    """Decode tokens/s of the three caches."""
    chosen = decode()
    shown = sorted({context for context, _ in chosen} if contexts is None else contexts)
    rows = []
    for context in shown:
        rates = {name: chosen[context, name]["median"] for name in ("dynamic", "static", "kvtier")}
        ratios = [chosen[context, "kvtier"]["ratio"]["median"], rates["kvtier"] / rates["static"]]
        shown_rates = [number(rates[name]) for name in ("dynamic", "static", "kvtier")]
        rows.append([tokens(context), *shown_rates, *(f"{ratio:.1f} x" for ratio in ratios)])
    header = ["context, tokens", "DynamicCache, tokens/s", "StaticCache", "TieredKVCache"]
    header += ["against DynamicCache", "against StaticCache"]
    what = (
        "Decode on the CPU of a model with the shape of Qwen3-0.6B and random weights, bf16, one sequence. Against "
        "DynamicCache: the median of the ratios of runs in turn. Against StaticCache: the ratio of the medians."
    )
    return markdown(header, rows) + source((chosen[c, n] for c, n in chosen if c in shown), what)


def fits_table() -> str:
    """Which context fits into which memory; arithmetic on the shapes, not a measurement."""
    rows = []
    for name, config in (("Qwen3-0.6B", QWEN3_0_6B), ("Llama-3.1-8B", LLAMA_3_1_8B)):
        token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        fitting = [f"{int(gib * 2**30 / token / 1000):,}k" for gib in (8, 8 + 64, 8 + 256)]
        rows.append([name, size(token), *fitting])
    header = ["model", "KV of a token", "8 GiB of device", "and 64 GiB of host", "and 256 GiB of host"]
    return markdown(header, rows)


def held_table() -> str:
    """Bytes that the caches hold."""
    chosen = held()
    rows = []
    for context in sorted({context for context, _ in chosen}):
        exact = chosen[context, "kvtier"]["workload"]["kv_bytes"]
        holds = [chosen[context, name]["facts"]["held_bytes"] for name in ("dynamic", "kvtier")]
        rows.append([tokens(context), size(exact), *(size(h) for h in holds)])
    header = ["context, tokens", "KV at the end of the run", "DynamicCache holds", "TieredKVCache holds"]
    return markdown(header, rows) + source(
        chosen.values(), "Memory of the caches, Qwen3-0.6B's shape, fp32, all in host memory."
    )


def process_table() -> str:
    """Growth of the process."""
    found = [r for r in records("memory", model="qwen3-0.6b") if r["unit"] == "MiB growth"]
    rows = [
        [NAMES[r["contender"]], tokens(r["workload"]["context"]), size(r["facts"]["kv_bytes"]), number(r["median"])]
        for r in found
    ]
    return markdown(["cache", "context, tokens", "KV", "the process grows by, MiB"], rows) + source(
        found, "Prefill and 32 tokens of Qwen3-0.6B's shape, bf16, each cache in a process of its own."
    ).replace("Median of 1 runs", "One run each")


def batch_table() -> str:
    """Four rows at once."""
    found = [r for r in records("decode", model="qwen3-0.6b", batch=4, unit="tokens/s") if r["contender"] in NAMES]
    rows = [
        [NAMES[r["contender"]], tokens(r["workload"]["context"]), number(r["median"]), f"{r['ratio']['median']:.1f} x"]
        for r in found
    ]
    return markdown(["cache", "context, tokens per row", "tokens/s of 4 rows", "against DynamicCache"], rows) + source(
        found, "Decode of four sequences, Qwen3-0.6B's shape, bf16."
    )


def host_table() -> str:
    """The native kernel against torch's attention and the machine's read rate."""
    found = records("host", dtype="bfloat16", heads=32, kv_heads=8, head_dim=128, batch=1, tokens=16384)
    # The last comparison in which all take part: whatever else was measured at this shape is another case.
    names = [r["contender"] for r in found]
    end = len(names) - names[::-1].index("kvtier, torch")
    start = end - 1 - names[:end][::-1].index("ceiling")
    last = dict(zip(names[start:end], found[start:end], strict=True))
    said = {
        "ceiling": "reading the same bytes",
        "kvtier": "kvtier, native kernel",
        "kvtier, torch": "kvtier without the native kernel",
        "sdpa": "torch's scaled_dot_product_attention",
    }
    rows = [[said[name], number(last[name]["median"])] for name in said if name in last]
    return markdown(["one decode attention call", "GB/s of keys and values"], rows) + source(
        last.values(), "32 query heads, 8 key-value heads of 128, bf16, 16,384 tokens."
    )


def conversation_table() -> str:
    """Time to the first token of a later turn."""
    found = [r for r in records("conversation") if r.get("contender") in ("kept", "computed again")]
    by_context: dict[int, dict[str, Record]] = {}
    for record in found:
        by_context.setdefault(record["workload"]["context"], {})[record["contender"]] = record
    rows = []
    for context, both in sorted(by_context.items()):
        kept, again = both["kept"]["median"], both["computed again"]["median"]
        rows.append([tokens(context), number(again * 1000), number(kept * 1000), f"{again / kept:.1f} x"])
    header = ["history, tokens", "computed again, ms", "kept in memory, ms", "faster by"]
    return markdown(header, rows) + source(found, "A turn of a conversation, the example model, fp32.")


def resume_table() -> str:
    """A turn in a new process."""
    found = [r for r in records("store_resume") if "contender" in r]
    rows = []
    for disk in dict.fromkeys(r["workload"]["disk"] for r in found):
        of = {r["contender"]: r["median"] for r in found if r["workload"]["disk"] == disk}
        rows.append([disk, *(number(of[name] * 1000) for name in ("compute", "load", "auto"))])
    header = ["disk", "all computed, ms", "all loaded, ms", "what kvtier chooses, ms"]
    return markdown(header, rows) + source(
        found,
        "Time to the first token of a saved conversation of 8,192 tokens in a new process, the example model; "
        "slow disks are emulated.",
    )


def overlap_table() -> str:
    """Policies over an emulated link."""
    found = [r for r in records("overlap") if "contender" in r]
    rows = [[f"`{r['contender'].split('@')[0]}`", r["contender"].split("@")[1], number(r["median"])] for r in found]
    return markdown(["policy", "device budget, of the KV", "ms per step"], rows) + source(
        found, "A step over an emulated link (simulated device, not a GPU)."
    )


def targets_table() -> str:
    """Every target that the records judge, missed ones included."""
    last: dict[tuple[str, str, str], Record] = {}
    for file in sorted(RESULTS.glob("*.jsonl")):
        scenario, _, kind = file.stem.partition("-")
        for record in read(file) if kind == KINDS.get(scenario, KIND) else ():
            if "target" in record:
                context = record.get("workload", {}).get("context", "")
                last[record["scenario"], record["target"], str(context)] = record
    # What several contexts have under one name is told apart by these.
    times = Counter((scenario, target) for scenario, target, _ in last)
    rows = []
    for (scenario, target, context), r in last.items():
        if r["figure"] is not None:
            where = f" (context {int(context):,})" if times[scenario, target] > 1 else ""
            name = f"{scenario}: {target.replace('|', '/')}{where}"
            rows.append([name, number(r["figure"]), r["limit"], r["verdict"]])
    return markdown(["target", "measured", "limit", "verdict"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "gains": lambda: gains((1024, 8192, 32768)),
    "decode": gains,
    "fits": fits_table,
    "held": held_table,
    "process": process_table,
    "batch": batch_table,
    "host": host_table,
    "conversation": conversation_table,
    "resume": resume_table,
    "overlap": overlap_table,
    "targets": targets_table,
}


def with_tables(text: str) -> str:
    """A Markdown page with each of its tables made again.

    Raises:
        KeyError: the page names a table that there is not.
    """
    return SECTION.sub(lambda m: m[1] + TABLES[m["name"]]() + m[3], text)


# -------------------------------------------------------------------------------------------- plots

Series = dict[str, list[list[float]]]


def decode_series() -> Series:
    """Of each cache: context, median, slowest and fastest run."""
    chosen = decode()
    return {
        name: [
            [context, r["median"], r["min"], r["max"]] for (context, who), r in sorted(chosen.items()) if who == name
        ]
        for name in ("kvtier", "static", "dynamic")
    }


def held_series() -> Series:
    """Of each cache: context, and bytes held."""
    chosen = held()
    return {
        name: [[context, r["facts"]["held_bytes"]] for (context, who), r in sorted(chosen.items()) if who == name]
        for name in ("kvtier", "dynamic")
    }


def conversation_series() -> Series:
    """Kept and computed again: history, seconds."""
    found = records("conversation")
    return {
        name: [[r["workload"]["context"], r["median"]] for r in found if r.get("contender") == name]
        for name in ("kept", "computed again")
    }


def draw_decode(axes: Any, series: Series) -> None:
    """Tokens/s over the context, both logarithmic."""
    for name, points in series.items():
        context, median, low, high = zip(*points, strict=True)
        axes.fill_between(context, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
        axes.plot(context, median, marker="o", markersize=4, color=COLOURS[name], label=NAMES[name])
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="decode, tokens/s")
    axes.set_title("Decode, one CPU thread: Qwen3-0.6B's shape, bf16", fontsize=12)
    _ticks(axes, [p[0] for p in series["kvtier"]], [0.2, 0.5, 1, 2, 5])


def draw_held(axes: Any, series: Series) -> None:
    """GiB over the context."""
    for name, points in series.items():
        style = {"kvtier": "-", "dynamic": "--"}[name]
        axes.plot(
            [p[0] for p in points],
            [p[1] / 2**30 for p in points],
            style,
            marker="o",
            markersize=4,
            color=COLOURS[name],
            label=NAMES[name],
        )
    axes.set(xlabel="context, tokens", ylabel="held by the cache, GiB")
    axes.set_title("Memory on a CPU model: Qwen3-0.6B's shape, fp32", fontsize=12)
    contexts = [p[0] for p in series["kvtier"]]
    axes.set_xticks(contexts, [_thousands(c) for c in contexts])


def draw_conversation(axes: Any, series: Series) -> None:
    """Two bars of each history."""
    places = range(len(series["kept"]))
    for shift, name, colour in ((-0.2, "computed again", COLOURS["dynamic"]), (0.2, "kept", COLOURS["kvtier"])):
        bars = axes.bar([p + shift for p in places], [p[1] for p in series[name]], 0.38, color=colour, label=name)
        axes.bar_label(bars, labels=[f"{p[1] * 1000:,.0f} ms" for p in series[name]], fontsize=10, padding=2)
    axes.set_xticks(list(places), [f"{p[0]:,} tokens of history" for p in series["kept"]])
    axes.set_ylabel("time to the first token, s")
    axes.margins(y=0.12)
    axes.set_title("A later turn of a conversation, the example model", fontsize=12)


def _thousands(count: float) -> str:
    return f"{count / 1024:g}k" if count >= 1024 else f"{count:g}"


def _ticks(axes: Any, contexts: Sequence[float], rates: Sequence[float]) -> None:
    axes.set_xticks(contexts, [_thousands(c) for c in contexts])
    axes.set_yticks(rates, [f"{r:g}" for r in rates])
    axes.minorticks_off()


DRAWN: dict[str, tuple[Callable[[], Series], Callable[[Any, Series], None]]] = {
    "decode": (decode_series, draw_decode),
    "held": (held_series, draw_held),
    "conversation": (conversation_series, draw_conversation),
}


def digest(series: Series) -> str:
    """Names the points of a plot."""
    return hashlib.sha256(json.dumps(series, sort_keys=True).encode()).hexdigest()


def digests() -> dict[str, str]:
    """Of every plot, what it is to be drawn from."""
    return {name: digest(points()) for name, (points, _) in DRAWN.items()}


def draw_all() -> None:
    """Draw those plots whose points differ from what they were drawn from."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kvtier", "svg.fonttype": "path", "font.size": 11})
    from matplotlib import pyplot

    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, (points, draw) in DRAWN.items():
        figure, axes = pyplot.subplots(figsize=(6.0, 3.8), layout="constrained")
        draw(axes, points())
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)
    INPUTS.write_text(json.dumps(digests(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------- run


def outdated() -> list[str]:
    """What has to be made again: pages whose tables differ from the records, plots drawn from other points."""
    pages = [ROOT / page for page in PAGES if (ROOT / page).is_file()]
    found = [p.relative_to(ROOT).as_posix() for p in pages if with_tables(text := p.read_text("utf-8")) != text]
    drawn = json.loads(INPUTS.read_text("utf-8")) if INPUTS.is_file() else {}
    plots = {name: PLOTS / f"{name}.svg" for name in DRAWN}
    wanted = digests()
    return found + [
        plots[name].relative_to(ROOT).as_posix()
        for name in DRAWN
        if drawn.get(name) != wanted[name] or not plots[name].is_file()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        for page in (ROOT / name for name in PAGES):
            if page.is_file():
                page.write_text(with_tables(page.read_text("utf-8")), encoding="utf-8")
        draw_all()
    late = outdated()
    for name in late:
        print(f"out of date: {name} (make figures)", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
