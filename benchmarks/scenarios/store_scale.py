"""A store's folder at scale: what it takes to find, to open and to read.

index          microseconds of an operation, and bytes, by the number of chunks in the index
open           seconds to open a folder by its number of chunks; their files are sparse, and nothing of them is read
conversations  what conversations that are opened, saved and closed leave: bytes, handles, threads
read           bytes per second of a saved sequence that a new process loads, against a plain read of the same files
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.children import Children
from benchmarks.harness import Bench
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import MANIFEST, Folder
from kvtier.conversation.disk.rows.manifest import Manifest, Row
from kvtier.conversation.index import PrefixIndex, packed

SUMMARY = "the folder of a store at scale: finding, opening, reading, and what is left when it is closed (CPU only)"
CASES = ("index", "open", "conversations", "read")
NAME = "store_scale"
#: Chunks, and of these the turns of one conversation; tokens of one.
INDEX, TURNS, TOKENS = (1_000, 10_000, 100_000, 1_000_000), 10, 64
#: Bytes of all files of a folder that is opened. Of a model of 0.6B parameters (28 layers of 8 heads of 128 numbers of
#: two bytes) that is 872,000 tokens.
DESCRIBED = 100 * 10**9
#: Chunks of such a folder, and tokens of one: files as large as a store makes them, and turns of `TOKENS`. The last one
#: is of as many bytes and of more tokens, for a model that takes less for each.
OPEN = ((3_000, 291), (13_600, TOKENS), (100_000, TOKENS))
#: Operations that are timed at each size.
TIMED = 2000
CONVERSATIONS = 10_000
#: Of `read`: bytes, files and turns.
READ, FILES, ROUNDS = 2**29, 4, 5
OF = {"model": "m", "config": "c", "weights": "w"}


def run(bench: Bench) -> None:
    """Run the scenario."""
    cases = {"index": index, "open": opening, "conversations": conversations, "read": reading}
    for name, case in cases.items():
        if bench.settings.cases is None or name in bench.settings.cases:
            bench.progress(f"{NAME}: {name}")
            case(bench)


def judged(bench: Bench, targets: list[Target]) -> None:
    """Print and record targets."""
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, **target.fields())


def microseconds(each: Callable[[int], object], count: int) -> tuple[float, float]:
    """The median of calls, and what one of a hundred takes longer than."""
    times = []
    for n in range(count):
        began = time.perf_counter()
        each(n)
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return statistics.median(times), times[len(times) * 99 // 100]


class Filled:
    """An index of conversations of some turns each, all different."""

    def __init__(self, chunks: int) -> None:
        self.random, self.index = random.Random(0), PrefixIndex[Chunk]()
        self.chunks, self.ids = list[Chunk](), list[bytes]()
        for _ in range(chunks):
            self.add()

    def some(self) -> bytes:
        """Ids of a turn."""
        return packed(self.random.choices(range(50_000), k=TOKENS))

    def add(self) -> None:
        """Add a turn to the last conversation, or begin one."""
        n, own = len(self.chunks), self.some()
        parent = self.chunks[-1] if n % TURNS else None
        start = 0 if parent is None else parent.stop
        chunk = Chunk(n, parent, start, start + TOKENS, 10**6, b"%4d" % (n % 10000), b"%16d" % n)
        if parent is None:
            self.index.add("k", own, chunk)
            self.ids.append(own)
        else:
            self.index.extend(parent, 0, own, chunk)
            self.ids[-1] += own
        self.chunks.append(chunk)


def timed(filled: Filled) -> dict[str, tuple[float, float]]:
    """What operations take."""
    rng, index = random.Random(1), filled.index
    wanted = [rng.choice(filled.ids) for _ in range(TIMED)]
    missing, own = [ids[8:] for ids in wanted], [filled.some() for _ in range(TIMED)]
    ends = rng.sample(filled.chunks, min(TIMED, len(filled.chunks)))
    new = [(end, Chunk(-n, end, end.stop, end.stop + TOKENS, 1, b"", b"")) for n, end in enumerate(ends)]
    return {
        "find": microseconds(lambda n: index.find("k", wanted[n]), TIMED),
        "miss": microseconds(lambda n: index.find("k", missing[n]), TIMED),
        "add": microseconds(lambda n: index.extend(new[n][0], 0, own[n], new[n][1]), len(new)),
        "remove": microseconds(lambda n: index.remove(new[n][1]), len(new)),
    }


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def index(bench: Bench) -> None:
    """What an operation takes, by the number of chunks."""
    rows: list[list[str]] = []
    slowest = dict[int, float]()
    for chunks in INDEX[:2] if bench.settings.quick else INDEX:
        before = resident()
        filled = Filled(chunks)
        nbytes = (resident() - before - sum(map(len, filled.ids))) / chunks
        gc.freeze()
        found = timed(filled)
        gc.unfreeze()
        for name, (median, late) in found.items():
            rows.append([f"{chunks:,}", name, number(median), number(late), number(nbytes)])
            workload = {"case": "index", "chunks": chunks, "turns": TURNS, "tokens": TOKENS}
            facts = {"p99": late, "bytes_per_chunk": nbytes}
            bench.record(NAME, contender=name, workload=workload, unit="us", median=median, n=TIMED, facts=facts)
        slowest[chunks] = max(median for median, _ in found.values())
        del filled
    print(f"{NAME} · index · conversations of {TURNS} turns of {TOKENS} tokens")
    print(table(["chunks", "", "us, median", "99%", "bytes per chunk"], rows))
    least, most = min(slowest), max(slowest)
    judged(
        bench,
        [
            Target(f"slowest operation at {most:,} chunks, us", slowest[most], "<=", 100),
            Target(f"slowest operation, {most:,} / {least:,} chunks", slowest[most] / slowest[least], "<=", 10),
        ],
    )


def described(folder: Path, chunks: int, tokens: int) -> None:
    """A folder of so many chunks whose files have room for `DESCRIBED` bytes and hold none."""
    rng, held = random.Random(0), Folder(folder)
    manifest = Manifest(folder / MANIFEST, OF)
    with manifest.transaction():
        parent: tuple[int, bytes] | None = None
        for n in range(1, chunks + 1):
            parent = parent if (n - 1) % TURNS else None
            own = packed(rng.choices(range(50_000), k=tokens))
            start = (n - 1) % TURNS * tokens
            row = Row.of(n, "k", parent, start, own, DESCRIBED // chunks, b"four")
            manifest.add(row, n)
            parent = n, row.digest
            handle = os.open(held.file(n), os.O_CREAT | os.O_WRONLY, 0o600)
            os.truncate(handle, DESCRIBED // chunks)
            os.close(handle)
    manifest.close()
    held.close()


def opening(bench: Bench) -> None:
    """Seconds until a folder is open."""
    rows, targets = [], []
    for chunks, tokens in OPEN[:2] if bench.settings.quick else OPEN:
        with tempfile.TemporaryDirectory() as at:
            described(Path(at), chunks, tokens)
            times = []
            for _ in range(5):
                began = time.perf_counter()
                disk = Disk(at, None, OF)
                times.append(time.perf_counter() - began)
                assert disk.chunks == chunks
                disk.close()
        median = statistics.median(times)
        rows.append([f"{chunks:,}", f"{tokens}", number(median), f"{number(min(times))} .. {number(max(times))}"])
        workload = {"case": "open", "chunks": chunks, "bytes": DESCRIBED, "tokens": tokens}
        facts = {"low": min(times), "high": max(times)}
        bench.record(NAME, contender="open", workload=workload, unit="s", median=median, n=len(times), facts=facts)
        if chunks * tokens < 10**6:
            targets.append(Target(f"seconds to open {chunks:,} chunks of {DESCRIBED / 1e9:.0f} GB", median, "<=", 1))
    print(f"{NAME} · open · {DESCRIBED / 1e9:.0f} GB in sparse files")
    print(table(["chunks", "tokens of each", "seconds to open", "low .. high"], rows))
    judged(bench, targets)


def conversations(bench: Bench) -> None:
    """What is left of conversations, in one folder that is opened and closed now and then."""
    count = 500 if bench.settings.quick else CONVERSATIONS

    def some(at: str, numbers: range) -> None:
        disk = Disk(at, 2 * 10**6, OF)
        for n in numbers:
            ids = packed(random.Random(n).choices(range(50_000), k=TOKENS))
            disk.save_conversation(f"{n}", {"ids": [n] * TOKENS, "messages": [], "salt": None})
            disk.write("k", ids, 0, None, {"k.0": torch.zeros(1, TOKENS, 4)}, "")
            _, chunk = disk.find("k", ids)
            assert chunk is not None
            assert [x.stop for x in disk.read(chunk, TOKENS)] == [TOKENS]
            disk.drop_conversation(f"{n}")
        disk.close()

    # Where files are kept in memory, for what is counted is not the disk's speed.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as at:
        portion = count // 20
        some(at, range(5 * portion))
        before = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
        for n in range(5, 20):
            some(at, range(n * portion, (n + 1) * portion))
        after = resident(), len(os.listdir("/proc/self/fd")), threading.active_count()
        files = sum(x.stat().st_size for x in Path(at).iterdir())
    grown = (after[0] - before[0]) / (15 * portion)
    workload = {"case": "conversations", "conversations": count}
    facts = {"handles": after[1] - before[1], "threads": after[2] - before[2], "bytes_of_files": files}
    bench.record(NAME, contender="left", workload=workload, unit="bytes", median=grown, n=15 * portion, facts=facts)
    print(f"{NAME} · conversations · {count:,}, of which three quarters are counted")
    judged(
        bench,
        [
            Target("bytes of memory that a conversation leaves", grown, "<=", 100),
            Target("handles and threads that all leave", sum(after[1:]) - sum(before[1:]), "<=", 0),
        ],
    )


READER = """
import sys, time
from pathlib import Path
import torch
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.index import packed
torch.set_num_threads(1)
at, way, tokens, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
disk = Disk(at, None, {"model": "m", "config": "c", "weights": "w"})
files = sorted(Path(at).glob("*.safetensors"))
for _ in range(rounds):
    began = time.perf_counter()
    if way == "plain":
        got = 0
        for file in files:
            # As whoever needs the bytes in memory of its own would.
            into = memoryview(torch.empty(file.stat().st_size, dtype=torch.uint8).numpy())
            with file.open("rb", buffering=0) as stream:
                at = 0
                while at < len(into):
                    at += stream.readinto(into[at : at + 2**20])
            got += at
    else:
        length, chunk = disk.find("k", packed([1] * tokens))
        got, until = 0, 0
        for part in disk.read(chunk, length):
            got, until = got + sum(x.nbytes for x in part.tensors.values()), part.stop
        assert until == tokens, disk.problem
    seconds = time.perf_counter() - began
    print(got / seconds, flush=True)
"""


def reading(bench: Bench) -> None:
    """Bytes per second from the page cache, in turn; a process of its own each time."""
    nbytes = READ // 16 if bench.settings.quick else READ
    rates: dict[str, list[float]] = {"plain": [], "load": []}
    with tempfile.TemporaryDirectory() as at, Children() as children:
        disk, tokens, part = Disk(at, None, OF), 0, nbytes // FILES // 2
        chunk = None
        for _ in range(FILES):
            tensors = {
                name: torch.randint(0, 256, (1, 4096, part // 4096), dtype=torch.uint8) for name in ("k.0", "v.0")
            }
            chunk = disk.write("k", packed([1] * (tokens + 4096)), tokens, chunk, tensors, "")
            assert chunk is not None, disk.problem
            tokens += 4096
        disk.close()
        for _ in range(ROUNDS):
            for way, found in rates.items():
                command = [sys.executable, "-c", READER, at, way, str(tokens), "3"]
                ended = children.run(command, 120, keep=True)
                assert ended.code == 0, ended.tail
                found.append(float(ended.tail.split()[-3]))  # the first: a load has no second one
    shares = [load / plain for load, plain in zip(rates["load"], rates["plain"], strict=True)]
    rows = []
    for way, found in rates.items():
        median = statistics.median(found)
        rows.append([way, number(median / 1e9), f"{number(min(found) / 1e9)} .. {number(max(found) / 1e9)}"])
        facts = {"low": min(found), "high": max(found)}
        workload = {"case": "read", "bytes": nbytes, "files": FILES}
        bench.record(NAME, contender=way, workload=workload, unit="B/s", median=median, n=len(found), facts=facts)
    print(f"{NAME} · read · {nbytes / 2**20:.0f} MiB in {FILES} files, from the page cache")
    print(table(["", "GB/s", "low .. high"], rows))
    judged(bench, [Target("checked and loaded / plain read", statistics.median(shares), ">=", 0.7)])
