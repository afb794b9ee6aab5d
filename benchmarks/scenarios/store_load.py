"""Loading what an earlier process saved: from the page cache into a cache's blocks, against a plain read of the files.

The shape is that of a model of 0.6B parameters; the keys and values are random, and no model is needed. They are saved
and loaded by a store's `Archive`, in the files that it makes. Each way has a new process each time, which has imported
everything and made a cache and closed it, as a `ConversationStore` does when it is made. The plain reader reads every
file into memory of its own, as whoever needs all of it would.

The first load of a process writes into memory that it gets from the system then; the second one into memory that the
process has, as far as it keeps some. A virtual machine's host may take back what is free, and then gives each page
anew. On such machines that takes several times as long as reading does, by far the most for huge pages, which are never
left over from something small. So half of the processes of either way have the machine's memory at hand: they touch
more than they will need in huge pages and give it back, just before they begin. How fast that touch was is recorded.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config

from benchmarks.children import Children
from benchmarks.harness import Bench
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier import TieredMemory
from kvtier.conversation.archive import Archive
from kvtier.conversation.disk.chunks import Disk
from kvtier.conversation.index import packed
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.waiting import Saved

SUMMARY = "loading a saved conversation in a new process, against a plain read of its files (CPU only)"
NAME = "store_load"
LAYERS, HEADS, HEAD = 28, 8, 128
#: Turns of a conversation, and tokens of all of them together; processes of each way.
TURNS, TOKENS, ROUNDS = (1, 4), 4096, 5
OF = {"model": "m", "config": "c", "weights": "w"}
#: Ways to read, and whether the machine's memory is at hand.
WAYS = (("plain", False), ("load", False), ("plain", True), ("load", True))

READER = """
import mmap, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
at, way, tokens, touched = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
files = sorted(Path(at).glob("*.safetensors"))
nbytes = sum(x.stat().st_size for x in files)
if way == "plain":
    def once():
        held = []
        for file in files:
            held.append(memoryview(torch.empty(file.stat().st_size, dtype=torch.uint8).numpy()))
            with file.open("rb", buffering=0) as stream:
                n = 0
                while n < len(held[-1]):
                    n += stream.readinto(held[-1][n : n + 2**20])
else:
    from benchmarks.scenarios.store_load import archive_of, cache_of
    from kvtier import TieredMemory
    from kvtier.conversation.index import packed
    from kvtier.cpu import loader
    assert loader.available()
    memory = TieredMemory()
    cache_of(memory).close()
    archive = archive_of(at)
    def once():
        with cache_of(memory, max_tokens=tokens) as cache:
            length, chunk = archive.find("k", packed([1] * tokens), stateful=False)
            got, _ = archive.load(cache, chunk, length, stateful=False)
            assert got == tokens == cache.get_seq_length(), archive.disk.problem
def touch(nbytes):
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    began = time.perf_counter()
    torch.frombuffer(region, dtype=torch.uint8).fill_(1)
    return nbytes / (time.perf_counter() - began)
rate = touch(2 * nbytes) if touched else 0.0
for _ in range(2):
    began = time.perf_counter()
    once()
    print(nbytes / (time.perf_counter() - began), flush=True)
print(rate)
"""


def cache_of(memory: TieredMemory, **options: int) -> JournalledCache:
    """A new cache of the model."""
    config = Qwen3Config(
        num_hidden_layers=LAYERS,
        num_key_value_heads=HEADS,
        num_attention_heads=2 * HEADS,
        head_dim=HEAD,
        hidden_size=2 * HEADS * HEAD,
    )
    return JournalledCache(config, memory=memory, **options)


def archive_of(at: str, keys_and_values: JournalledCache | None = None) -> Archive:
    """Of a folder; what it saves is in a cache, which it closes."""
    return Archive(Disk(at, None, OF), lambda saved: keys_and_values, lambda: [], lambda: torch.device("cpu"))


def save(at: str, turns: int, tokens: int) -> int:
    """Save a conversation of so many turns, as a store does. The bytes of its files."""
    with TieredMemory() as memory:
        for turn in range(1, turns + 1):
            cache, length = cache_of(memory), tokens * turn // turns
            for i in range(LAYERS):
                keys, values = (
                    torch.randint(-999, 999, (1, HEADS, length, HEAD), dtype=torch.int16).view(torch.bfloat16)
                    for _ in "kv"
                )
                cache._forward.restore(i, keys, values)
            cache._forward.steps.end()
            archive = archive_of(at, cache)
            archive.save(Saved("k", packed([1] * length), None, "k"))
            assert archive.disk.find("k", packed([1] * tokens))[0] == length, archive.disk.problem
            archive.close()
    return sum(x.stat().st_size for x in Path(at).glob("*.safetensors"))


def run(bench: Bench) -> None:
    """Run the scenario."""
    for turns in TURNS:
        measure(bench, turns)


def measure(bench: Bench, turns: int) -> None:
    """All ways in turn; print and record the figures."""
    tokens = TOKENS // 16 if bench.settings.quick else TOKENS
    rates: dict[str, list[float]] = {}
    touches: list[float] = []
    with tempfile.TemporaryDirectory() as at, Children() as children:
        nbytes = save(at, turns, tokens)
        files = len(list(Path(at).glob("*.safetensors")))
        for n in range(2 if bench.settings.quick else ROUNDS):
            for way, touched in WAYS:
                bench.progress(f"{NAME}: {turns} turns, process {n + 1}, {way}")
                command = [sys.executable, "-c", READER, at, way, str(tokens), str(int(touched))]
                ended = children.run(command, 120, keep=True)
                assert ended.code == 0, ended.tail
                first, again, touch = map(float, ended.tail.split()[-3:])
                name = f"{way}, memory at hand" if touched else way
                rates.setdefault(name, []).append(first)
                rates.setdefault(f"{name}, again", []).append(again)
                touches += [touch] if touched else []
    bench.progress("")
    workload = {"turns": turns, "tokens": tokens, "bytes": nbytes, "files": files}
    workload |= {"layers": LAYERS, "heads": HEADS, "head": HEAD}
    rows = []
    for name, found in (rates | {"first touch of huge pages": touches}).items():
        median = statistics.median(found)
        rows.append([name, number(median / 1e9), f"{number(min(found) / 1e9)} .. {number(max(found) / 1e9)}"])
        facts = {"low": min(found), "high": max(found)}
        bench.record(NAME, contender=name, workload=workload, unit="B/s", median=median, n=len(found), facts=facts)
    print(f"{NAME} · {nbytes / 2**20:.0f} MiB, {turns} turns in {files} files, from the page cache into blocks")
    print(table(["", "GB/s", "low .. high"], rows))
    targets = [
        Target(
            f"load / plain read{what}, {turns} turns",
            statistics.median(a / b for a, b in zip(rates[f"load{what}"], rates[f"plain{what}"], strict=True)),
            ">=",
            0.7,
        )
        for what in ("", ", again", ", memory at hand", ", memory at hand, again")
    ]
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
