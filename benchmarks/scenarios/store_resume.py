"""A turn of a saved conversation in a new process: time to its first token, by what is loaded and what is computed.

Each way has a new process each time, with a model, a store and the folder that an earlier process left. That one has
loaded and computed before, so that the folder says what both take.

compute   the folder is not there
load      all that is saved is loaded (`loading="always"`)
auto      what is expected to be soonest

The disk is the page cache, and then one that is as slow as computing is, and one that is half as fast as that: reading
takes as many seconds more as such a disk would need for the bytes. There, to compute the head while the tail is loaded
is faster than either.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.children import Children
from benchmarks.harness import Bench
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of

SUMMARY = "a turn of a saved conversation in a new process: loaded, computed again, or both at once (CPU only)"
NAME = "store_resume"
MODEL = "examples/pylm"
#: Tokens of the history, of a turn, and turns until it has so many; processes of each way.
TOKENS, NEW, TURNS, ROUNDS = 8192, 64, 8, 5
#: From the page cache, where a turn takes a tenth of a second, and processes differ by a third.
ROUNDS_CACHED = 11
#: Seconds that a disk needs for the history, as a multiple of those in which it is computed; None: the page cache.
DISKS: dict[str, float | None] = {"page cache": None, "as slow as computing": 1.0, "half as fast": 2.0}
WAYS = ("compute", "load", "auto")

CHILD = """
import json, sys, time
import torch
said = json.loads(sys.argv[1])
torch.set_num_threads(said["threads"])
import kvtier
from benchmarks.models import load
from kvtier.conversation.saved import archive
from kvtier.conversation.disk import reading

archive.LARGEST = said["file"]
rate, read = said["rate"], reading.read_tensors
if rate:
    reading.seems_cached = lambda *args: False
def slow(file, nbytes, *args):
    began = time.perf_counter()
    found = read(file, nbytes, *args)
    if rate:
        time.sleep(max(began + nbytes / rate - time.perf_counter(), 0))
    return found
reading.read_tensors = slow

model = load(said["model"], torch.device("cpu"), torch.float32)
draw = torch.Generator("cpu").manual_seed(0)
history = torch.randint(5, model.config.vocab_size, (1, said["tokens"]), generator=draw)
draw.manual_seed(said["seed"])
def some(n):
    return torch.randint(5, model.config.vocab_size, (1, n), generator=draw)
def turn(store, ids, new=1):
    began = time.perf_counter()
    store.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)[0, -1].item()
    return time.perf_counter() - began

options = {} if said["way"] == "compute" else {"directory": said["at"], "loading": "always"}
if said["way"] in ("auto", "first"):
    options["loading"] = "auto"
with kvtier.ConversationStore(model, **options) as store:
    turn(store, some(8))  # whatever is done once in a process
    if said["way"] == "first":
        # The history, turn by turn; computed at several lengths, loaded and, where that is chosen, both at once. What a
        # forward takes is known when the next one begins.
        for n in range(1, said["turns"] + 1):
            turn(store, history[:, : said["tokens"] * n // said["turns"]])
        store.flush()
        for n in range(said["tries"]):
            store.clear()
            turn(store, torch.cat([history, some(said["new"])], 1), 2)
            store.clear()
            turn(store, some(said["tokens"] // 2 ** (n % 3)), 2)
        print(store.stats.saved_bytes)
    else:
        seconds = turn(store, torch.cat([history, some(said["new"])], 1))
        row = store.reuse[0]
        print(json.dumps([seconds, row.loaded, row.computed]))
"""


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        return
    tokens, rounds = (1024, 2) if bench.settings.quick else (TOKENS, ROUNDS)
    said: dict[str, Any] = {"model": MODEL, "tokens": tokens, "new": NEW, "turns": TURNS, "tries": 3, "threads": 2}
    with Children() as children, tempfile.TemporaryDirectory() as folder:

        def child(**more: Any) -> str:
            command = [sys.executable, "-c", CHILD, json.dumps(said | {"rate": None, "seed": 0, "file": 2**20} | more)]
            ended = children.run(command, 300, keep=True)
            assert ended.code == 0, ended.tail
            return ended.tail.splitlines()[-1]

        saved = Path(folder, "saved")
        nbytes = int(child(way="first", at=str(saved)))
        computing = statistics.median(json.loads(child(way="compute", seed=9 + n))[0] for n in range(rounds))
        for disk, slower in DISKS.items():
            rate, at = None if slower is None else nbytes / (slower * computing), saved
            if rate is not None:
                at = Path(folder, disk)
                bench.progress(f"{NAME}: a disk {disk}")
                child(way="first", at=str(at), rate=rate)
            found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for n in range(rounds if rate is not None or bench.settings.quick else ROUNDS_CACHED):
                for way in WAYS if n % 2 else WAYS[::-1]:
                    bench.progress(f"{NAME}: {disk}, process {n + 1}, {way}")
                    copy = shutil.copytree(at, Path(folder, "copy"))
                    found[way].append(json.loads(child(way=way, at=str(copy), rate=rate, seed=1 + n)))
                    shutil.rmtree(copy)
            report(bench, disk, rate, nbytes, tokens, found)
    bench.progress("")


def report(
    bench: Bench, disk: str, rate: float | None, nbytes: int, tokens: int, found: dict[str, list[list[float]]]
) -> None:
    """Print and record the figures of one disk."""
    bench.progress("")
    workload = {"model": MODEL, "tokens": tokens, "new_tokens": NEW, "bytes": nbytes, "disk": disk}
    better = [min(a[0], b[0]) for a, b in zip(found["compute"], found["load"], strict=True)]
    rows = []
    for way, those in found.items():
        times, loaded = [x[0] for x in those], statistics.median(x[1] for x in those)
        ratio = statistics.median(a / b for a, b in zip(times, better, strict=True))
        rows.append(
            [way, number(statistics.median(times)), f"{number(min(times))} .. {number(max(times))}", f"{loaded:.0f}"]
        )
        facts = {"low": min(times), "high": max(times), "loaded": loaded, "rate": rate}
        bench.record(
            NAME,
            contender=way,
            workload=workload,
            unit="s",
            median=statistics.median(times),
            n=len(times),
            ratio=ratio,
            facts=facts,
        )
    print(f"{NAME} · {tokens:,} tokens, {nbytes / 2**20:.0f} MiB · {disk}")
    print(table(["", "seconds to the first token", "low .. high", "tokens loaded"], rows))
    share = statistics.median(a[0] / b for a, b in zip(found["auto"], better, strict=True))
    target = Target(f"auto / the better of the two, {disk}", share, "<=", 1.1)
    print("\n" + table_of([target]) + "\n", flush=True)
    bench.record(NAME, workload=workload, **target.fields())
