"""Loading what an earlier process saved: from the page cache into a cache's blocks, against a plain read of the files.

The shape is that of a model of 0.6B parameters; the keys and values are random, and no model is needed. Each way has a
new process each time. The first load of a process pays for the memory that it gets from the system, for the buffer and
for the blocks; the second one, into memory that the process has already, shows what reading, checking and writing cost.

plain   the files are read into new memory, as much as all of them need
load    they are read, checked and written into blocks
touch   nothing is read: as many bytes of new memory are written once, on ordinary pages
huge    the same on huge pages. Where a virtual machine gives free memory back to its host, these come from there, small
        page by small page, and ordinary ones mostly do not: blocks are on ordinary ones then
"""

from __future__ import annotations

import statistics
import sys
import tempfile

import torch

from benchmarks.children import Children
from benchmarks.harness import Bench
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.files import LARGEST
from kvtier.conversation.index import packed

SUMMARY = "loading a saved conversation in a new process, against a plain read of its files (CPU only)"
NAME = "store_load"
LAYERS, HEADS, HEAD = 28, 8, 128
#: Turns of a conversation, and tokens of all of them together; processes of each way.
TURNS, TOKENS, ROUNDS = (1, 4), 4096, 5
OF = {"model": "m", "config": "c", "weights": "w"}

READER = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
at, way, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = sorted(Path(at).glob("*.safetensors"))
nbytes = sum(x.stat().st_size for x in files)
if way == "plain":
    def once():
        # As whoever needs the bytes in memory of its own would: memory that is used again for the next file costs less.
        into, n = memoryview(torch.empty(nbytes, dtype=torch.uint8).numpy()), 0
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while got := stream.readinto(into[n : n + 2**20]):
                    n += got
        assert n == nbytes
elif way in ("touch", "huge"):
    import mmap
    def once():
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if way == "huge":
            memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
else:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # and what that imports, as whoever loads a model has
    from kvtier import TieredMemory
    from kvtier.conversation.saved.archive import Archive
    from kvtier.conversation.disk.disk import Disk
    from kvtier.conversation.index import packed
    from kvtier.conversation.journal import JournalledCache
    from kvtier.cpu import loader
    from kvtier.hf.models.devices import Devices
    assert loader.available()
    config = Qwen3Config(num_hidden_layers=LAYERS, num_key_value_heads=HEADS, num_attention_heads=2 * HEADS,
                         head_dim=HEAD, hidden_size=2 * HEADS * HEAD)
    memory = TieredMemory()
    archive = Archive(Disk(at, None, OF), lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    def once():
        with JournalledCache(config, memory=memory) as cache:
            length, chunk = archive.find("k", packed([1] * tokens), stateful=False)
            got, _ = archive.load(cache, chunk, length)
            assert got == tokens == cache.get_seq_length(), archive.disk.problem
for _ in range(2):
    began = time.perf_counter()
    once()
    print(nbytes / (time.perf_counter() - began), flush=True)
"""


def run(bench: Bench) -> None:
    """Run the scenario."""
    for turns in TURNS:
        measure(bench, turns)


def files_of(tokens: int, turns: int) -> list[tuple[int, int]]:
    """The tokens of each file, as an archive parts those of a turn."""
    most, each = LARGEST // (2 * LAYERS * HEADS * HEAD * 2), tokens // turns
    return [
        (begin, min(begin + most, until))
        for until in range(each, tokens + 1, each)
        for begin in range(until - each, until, most)
    ]


def measure(bench: Bench, turns: int) -> None:
    """Both ways in turn; print and record the figures."""
    tokens = TOKENS // 16 if bench.settings.quick else TOKENS
    script = READER.replace("LAYERS", f"{LAYERS}").replace("HEADS", f"{HEADS}").replace("HEAD", f"{HEAD}")
    script = script.replace("OF)", f"{OF})")
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as at, Children() as children:
        disk, chunk = Disk(at, None, OF), None
        for begin, end in files_of(tokens, turns):
            tensors = {
                f"{x}.{i}": torch.randint(-999, 999, (HEADS, end - begin, HEAD), dtype=torch.int16).view(torch.bfloat16)
                for i in range(LAYERS)
                for x in "kv"
            }
            chunk = disk.write("k", packed([1] * end), begin, chunk, tensors, "")
            assert chunk is not None, disk.problem
        nbytes, files = disk.room.nbytes, disk.chunks
        disk.close()
        for n in range(2 if bench.settings.quick else ROUNDS):
            bench.progress(f"{NAME}: {turns} turns, process {n + 1}")
            for way in ("plain", "load", "touch", "huge"):
                ended = children.run([sys.executable, "-c", script, at, way, str(tokens)], 120, keep=True)
                assert ended.code == 0, ended.tail
                first, again = ended.tail.split()[-2:]
                rates.setdefault(way, []).append(float(first))
                rates.setdefault(f"{way}, again", []).append(float(again))
    bench.progress("")
    workload = {
        "turns": turns,
        "files": files,
        "tokens": tokens,
        "bytes": nbytes,
        "layers": LAYERS,
        "heads": HEADS,
        "head": HEAD,
    }
    rows = []
    for name, found in rates.items():
        median = statistics.median(found)
        rows.append([name, number(median / 1e9), f"{number(min(found) / 1e9)} .. {number(max(found) / 1e9)}"])
        facts = {"low": min(found), "high": max(found)}
        bench.record(NAME, contender=name, workload=workload, unit="B/s", median=median, n=len(found), facts=facts)
    print(f"{NAME} · {nbytes / 2**20:.0f} MiB in {files} files, from the page cache into blocks")
    print(table(["", "GB/s", "low .. high"], rows))
    targets = [
        Target(
            f"load / plain read{what}, {files} files",
            statistics.median(a / b for a, b in zip(rates[f"load{what}"], rates[f"plain{what}"], strict=True)),
            ">=",
            0.7,
        )
        for what in ("", ", again")
    ]
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
