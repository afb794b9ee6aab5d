"""Whatever call to the system fails, and whenever the process ends: nothing that was saved is lost, nobody hears of it
but by `problem`, and what is read is right."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forks
import pytest
from disks import disk_of, load, save, states_of
from families import tiny_model
from test_store import Tokenizer, store_of
from test_store_interrupts import Line_

from kvtier import ConfigError, StoreInUseError
from kvtier.conversation.disk import writing
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows import manifest
from kvtier.conversation.disk.tools.contents import verify
from kvtier.conversation.index import packed

KILLS = int(os.environ.get("KVTIER_TEST_KILLS", "2")) * 5
A, A2, B, NEW = [1] * 20, [1] * 20 + [2] * 30, [3] * 25, [4] * 60

#: Calls of the system by which a folder is read and written. Some of them may have been done and fail.
CALLS = ("open", "write", "fsync", "replace", "unlink", "readv", "listdir", "fstat", "lstat", "stat", "fchmod", "mkdir")
DONE = ("fsync", "replace", "unlink", "close", "fchmod")


@contextmanager
def failing(at: int, error: int, done: bool, lasting: int = 1) -> Iterator[list[int]]:
    """The call of that number fails, of all that go to the system or to SQLite, and with `lasting` those that follow;
    with `done`, after it was done. Gives how many more would have been needed."""
    left = [at]

    def fails() -> bool:
        left[0] -= 1
        return -lasting <= left[0] <= -1

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            return self._call(super().execute, *args)

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            return self._call(super().executemany, *args)

        def _call(self, method: Callable[..., sqlite3.Cursor], *args: Any) -> sqlite3.Cursor:
            broken = fails()
            if broken and not done:
                raise sqlite3.OperationalError("disk I/O error")
            found = method(*args)
            if broken:
                raise sqlite3.OperationalError("disk I/O error")
            return found

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            broken = fails()
            if broken and not done:
                raise OSError(error, os.strerror(error))
            found = function(*args, **options)
            if broken:
                raise OSError(error, os.strerror(error))
            return found

        return call

    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest.sqlite3, "connect", lambda *x, **y: connect(*x, **y, factory=Connection))
        for name in DONE if done else CALLS:
            patch.setattr(os, name, wrapped(getattr(os, name)))
        yield left


def files_of(folder: Path) -> int:
    """Bytes; by calls that do not fail."""
    with os.scandir(folder) as found:
        return sum(x.stat().st_size for x in found if ".safetensors" in x.name)


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def new_turn(disk: Disk) -> None:
    """What a process does with a folder."""
    assert load(disk, A2) in (0, 20, 50)
    saved = save(disk, A2 + NEW)
    assert saved or disk.problem
    disk.save_conversation("c", {"ids": A2})
    disk.drop_conversation("gone")
    assert load(disk, A2 + NEW) in (0, 20, 50, 110)
    disk.check_integrity()


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, 1), (errno.EIO, 10**9)])
@pytest.mark.parametrize("evicts", [False, True], ids=["saves", "evicts"])
def test_whichever_call_fails_what_was_saved_is_there(
    evicts: bool, error: int, lasting: int, done: bool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    with_all = disk_of(source)
    assert all([save(with_all, x) for x in (B, A, A2)])
    with_all.save_conversation("gone", {})
    # Without B there is room for the new turn.
    budget = with_all.room.nbytes + 4000 - 1 if evicts else None
    with_all.close()
    if evicts:
        probe = disk_of(shutil.copytree(source, tmp_path / "probe"), budget)
        assert save(probe, A2 + NEW)
        assert not load(probe, B), "nothing had to make room"
        probe.close()
    gc.collect()  # what other tests have left
    before, at, refused = handles(), 0, 0
    while True:
        folder = shutil.copytree(source, tmp_path / f"{at}")
        with failing(at, error, done, lasting) as left:
            try:
                disk = disk_of(folder, budget)
            except (ConfigError, StoreInUseError):
                refused += 1
            else:
                new_turn(disk)
                disk.close()
        assert handles() == before, at
        again = disk_of(folder, budget)
        assert load(again, A2 + NEW) in (50, 110), at
        assert evicts or load(again, B) == len(B), at
        # A commit may have been done though it fails: then a row has no file.
        assert again.damaged <= done, at
        assert save(again, A2 + NEW), again.problem
        again.check_integrity()
        again.close()
        files = files_of(folder)
        assert files <= (again.room.budget or files)
        assert files == sum(x.nbytes for x in again._chunks)
        shutil.rmtree(folder)
        if left[0] >= 0:
            break
        at += 1
    assert at > 20
    assert refused


def test_a_process_goes_on_after_a_call_has_failed(tmp_path: Path) -> None:
    """In one process: what failed once is done the next time, and the budget is kept to."""
    at = 0
    while True:
        folder = tmp_path / f"{at}"
        disk = disk_of(folder, 20_000)
        for n in range(4):
            assert save(disk, [n] * 50)
        disk.close()
        with failing(10**9, errno.EIO, False) as left:
            disk = disk_of(folder, 20_000)
            left[0] = at
            for n in range(5, 25):
                save(disk, [n % 5] * 10 + [n] * 50)
                disk.check_integrity()
                assert files_of(folder) <= 20_000
        failed, left[0] = left[0] < 0, 10**9
        assert save(disk, [9] * 50)
        assert load(disk, [9] * 50) == 50
        assert load(disk, [4] * 10 + [24] * 50) == 60 or at
        disk.close()
        assert files_of(folder) <= 20_000
        if not failed:
            break
        at += 61 if at > 60 else 3
    assert at > 100


def test_a_file_and_its_name_are_on_the_disk_before_its_row_and_a_row_is_gone_before_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not show this: what the system was told outlives the process, and not the machine."""
    done: list[str] = []
    disk = disk_of(tmp_path)
    assert save(disk, B)
    disk.close()

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any) -> Any:
            of = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else os.fspath(args[0])
            done.append(f"{name} {Path(of).name}")
            return function(*args)

        return call

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, noted(name))
    disk = disk_of(tmp_path, 4000)
    done.clear()
    others = ("UPDATE", "PRAGMA")  # when chunks were used, and how many pages there are
    disk._manifest.db.set_trace_callback(lambda x: done.append(x.split()[0]) if x.split()[0] not in others else None)
    assert save(disk, A)
    new, old = "000000000002.safetensors", "000000000001.safetensors"
    assert done == [
        *("BEGIN", "DELETE", "COMMIT", f"unlink {old}"),
        *(f"fsync {new}.new", f"replace {new}.new", f"fsync {tmp_path.name}"),
        *("BEGIN", "INSERT", "COMMIT"),
    ]
    (synchronous,) = disk._manifest.db.execute("PRAGMA synchronous").fetchone()
    (journal,) = disk._manifest.db.execute("PRAGMA journal_mode").fetchone()
    assert (synchronous, journal) == (2, "wal"), "a commit is not on the disk when it returns"
    disk.close()


# Want of handles, of memory and of room, as the system has it


def in_child(script: str, folder: Path, *before: str) -> str:
    """Run a script that has `disk`, in a process of its own. What it prints."""
    here = Path(__file__).resolve().parent
    head = f"""
        import os, resource, signal, sys
        sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2])!r}]
        from pathlib import Path
        from disks import *
        folder = Path({str(folder)!r})
        """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    if before:
        found = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    else:
        found = forks.run(code)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADMSG, errno.EUCLEAN])
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "for good"])
def test_what_the_disk_has_lost_is_saved_anew(
    times: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it counts as saved, every process computes it and none saves it. What fails once is read again."""
    disk = disk_of(tmp_path)
    for ids in (A, A2, B):
        assert save(disk, ids)
    left, readv = [times], os.readv

    def failing_readv(handle: int, into: Any) -> int:
        if left[0] and os.readlink(f"/proc/self/fd/{handle}").endswith("/000000000002.safetensors"):
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        return readv(handle, into)

    monkeypatch.setattr(os, "readv", failing_readv)
    if times == 1:
        assert (load(disk, A2), disk.damaged) == (50, 0)
    else:
        assert [x.lasting for x in verify(tmp_path)[2]] == [True]
        assert load(disk, A2) == 20
        assert disk.damaged == 1
        assert "the disk has lost some of 000000000002.safetensors" in disk.problem
        assert save(disk, A2)
        assert load(disk, A2) == 50
    disk.close()
    disk = disk_of(tmp_path)
    assert (load(disk, A2), load(disk, B), disk.damaged) == (50, 25, 0)
    disk.close()


def test_a_process_without_handles_loses_nothing(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert save(disk, A)
        assert save(disk, A2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert load(disk, A2) == 0
        assert "Too many open files" in disk.problem
        assert not save(disk, A2 + NEW)
        assert (disk.chunks, disk.damaged) == (2, 0)
        with pytest.raises(ConfigError, match="Too many open files"):
            disk_of(tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert load(disk, A2) == 50
    assert save(disk, A2 + NEW)
    disk.close()


def test_a_file_that_may_not_grow_loses_nothing(tmp_path: Path) -> None:
    """The log of the manifest is stopped by it, too: SQLite sees a disk that is full."""
    out = in_child(
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        disk = disk_of(folder)
        saved = [save(disk, [n] * 20) for n in range(3)]
        for limit in (3000, 20_000, 30_000, 50_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
            wrong = [n for n in range(200) if not save(disk, [n % 20] * 20 + [n] * (400 if n % 2 else 2))]
            assert wrong and disk.problem, limit
            disk.check_integrity()
            assert all(load(disk, [n] * 20) == 20 for n in range(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert save(disk, [7] * 500) and load(disk, [7] * 500) == 500
        disk.close()
        again = disk_of(folder)
        assert all(load(again, [n] * 20) == 20 for n in range(3)) and load(again, [7] * 500) == 500
        assert again.damaged == 0
        print("whole")
        """,
        tmp_path,
    )
    assert out == "whole\n"


def on_small_disk(script: str, folder: Path, size: str) -> str:
    """What a script prints whose folder is a file system of its own, of so many bytes."""
    mounted = f'mount -t tmpfs -o size={size},mode=700 none {folder} && exec "$@"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "sh", "-c", mounted, "sh", "true"], capture_output=True).returncode
    ):
        pytest.skip("no small file system can be mounted here")
    return in_child(script, folder, "unshare", "-rm", "sh", "-c", mounted, "sh")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    script = """
        disk = disk_of(folder)
        saved = []
        for n in range(2000):
            ids = [n % 7] * 20 + [n] * 100
            if not save(disk, ids): break
            saved.append(ids)
        assert "No space left" in disk.problem or "full" in disk.problem, disk.problem
        for _ in range(5):
            assert not save(disk, [8] * 3000)
            disk.save_conversation("c", {"ids": [1] * 100_000})
            disk.check_integrity()
        assert all(load(disk, ids) == len(ids) for ids in saved)
        disk.close()
        again = disk_of(folder)
        assert all(load(again, ids) == len(ids) for ids in saved) and again.damaged == 0
        for ids in saved[:20]:
            chunk = again.find("k", packed(ids))[1]
            if chunk is not None: again.forget(chunk)
        assert save(again, [9] * 200), again.problem
        again.close()
        print(len(saved) > 20)
        """
    assert on_small_disk(script, tmp_path, "700k") == "True\n"


@pytest.mark.parametrize("budget", ["None", "16 * 2**20", "2 * 2**20"])
def test_what_is_saved_is_read_and_removed_from_a_disk_that_is_full(budget: str, tmp_path: Path) -> None:
    script = """
        from kvtier.conversation.disk.files.reserve import RESERVE
        from kvtier.conversation.disk.tools.contents import contents
        from kvtier.conversation.disk.tools.upkeep import Upkeep

        def fill():
            with open(folder / "filled", "ab", buffering=0) as file:
                for size in (2**20, 2**12, 1):
                    try:
                        while file.write(bytes(size)): pass
                    except OSError: pass
        def free():
            at = os.statvfs(folder)
            return at.f_bavail * at.f_frsize

        for is_open in (True, False):
            disk = disk_of(folder, BUDGET)
            for n in range(40):
                assert save(disk, [n] * 100), disk.problem
                assert disk.save_conversation(str(n), {"ids": [n] * 100})
            assert (folder / RESERVE).exists()
            if not is_open: disk.close()
            fill()
            assert free() == 0
            assert len(contents(folder).conversations) == 40
            if is_open:
                for n in range(20):
                    disk.drop_conversation(str(n))
                    disk.erase(None, packed([n] * 100), 0)
                assert not disk.forgotten and len(disk.names()) == 20, disk.problem
            else:
                with Upkeep(folder) as upkeep:
                    for n in range(20): upkeep.drop_conversation(str(n))
                    removed, nbytes = upkeep.collect()
                assert removed and nbytes, removed
            assert free() > 0
            os.unlink(folder / "filled")
            if not is_open: disk = disk_of(folder, BUDGET)
            disk.drop_conversation("39")
            assert (folder / RESERVE).exists(), "it is made again where there is room"
            disk.close()
        print("done")
        """
    assert on_small_disk(script.replace("BUDGET", budget), tmp_path, "80m") == "done\n"


def test_a_disk_that_is_read_only_is_an_error_and_one_that_becomes_so_loses_nothing(tmp_path: Path) -> None:
    script = """
        import subprocess
        disk = disk_of(folder)
        assert save(disk, [1] * 20)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)])  # busy, where a file is open for writing
        readonly = not os.access(folder, os.W_OK)
        disk.close()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        try:
            disk_of(folder)
        except Exception as error:
            print(type(error).__name__, "Read-only" in str(error))
        """
    assert on_small_disk(script, tmp_path, "1m") == "ConfigError True\n"


# A disk that does not answer


def test_who_looks_for_something_does_not_wait_for_a_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, fsync, began, hangs = disk_of(tmp_path), os.fsync, threading.Event(), threading.Event()
    assert save(disk, A)
    main = threading.current_thread()

    def slow(handle: int) -> None:
        if threading.current_thread() is not main and not hangs.is_set():
            began.set()
            assert hangs.wait(240)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    saved: list[bool] = []
    threads = [threading.Thread(target=lambda ids=ids: saved.append(save(disk, ids))) for ids in (A2, B)]
    for thread in threads:
        thread.start()
    assert began.wait(120)
    looked: list[object] = []
    looking = threading.Thread(target=lambda: looked.extend((load(disk, A2), disk.names(), disk.chunks)))
    looking.start()
    looking.join(120)
    assert looked == [20, {}, 1]
    closing = threading.Thread(target=disk.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "it is closed before a file is whole"
    hangs.set()
    for thread in (*threads, closing):
        thread.join()
    again = disk_of(tmp_path)
    assert again.damaged == 0
    assert len(files_of_chunks(tmp_path)) == again.chunks >= 2
    again.close()


def files_of_chunks(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors*"))


def test_what_continues_something_that_is_forgotten_while_it_is_written_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, A)
    chunk, write = disk.find("k", packed(A))[1], writing.write_tensors
    assert chunk is not None

    def forgets(*args: Any) -> Any:
        found = write(*args)
        disk.forget(chunk)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_tensors", forgets)
        assert not save(disk, A2)
    assert "removed meanwhile" in disk.problem
    assert not files_of_chunks(tmp_path)
    assert save(disk, A2)
    assert load(disk, A2) == len(A2)
    disk.check_integrity()
    disk.close()


@pytest.mark.parametrize("at", range(72))
def test_a_folder_whose_closing_is_interrupted_is_closed_by_the_next_call(at: int, tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, A)
    assert load(disk, A) == len(A)
    line = Line_(at, ("conversation/disk/",))
    with line.traced():
        disk.close()
    assert at < 71 or line.where is None, "more lines than are cut"
    disk.close()
    with contextlib.closing(disk_of(tmp_path)) as disk:
        assert load(disk, A) == len(A)
        assert not disk.problem


# What others do to the folder while it is open


@pytest.mark.parametrize("what", ["removed", "cut", "replaced by a link", "replaced by a pipe"])
def test_a_file_that_goes_while_it_is_open_is_computed_again(what: str, tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for ids in (A, A2, B):
        assert save(disk, ids)
    file = tmp_path / "000000000002.safetensors"
    if what == "cut":
        os.truncate(file, 100)
    else:
        file.unlink()
    if what == "replaced by a link":
        file.symlink_to(tmp_path / "000000000001.safetensors")
    elif what == "replaced by a pipe":
        os.mkfifo(file)
    assert load(disk, A2) == 20
    assert disk.damaged == 1
    assert disk.problem
    assert save(disk, A2)
    assert (load(disk, A2), load(disk, B)) == (50, 25)
    disk.check_integrity()
    disk.close()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "made again"])
def test_a_folder_that_goes_while_it_is_open_is_not_written_to(again: bool, tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "store")
    assert save(disk, A)
    shutil.rmtree(tmp_path / "store")
    other = disk_of(tmp_path / "store") if again else None
    if other is not None:
        assert save(other, B)
    assert not save(disk, A2)
    assert "removed, or replaced" in disk.problem
    disk.problem = ""
    assert not disk.save_conversation("a", {"ids": [1]})
    assert "removed, or replaced" in disk.problem
    assert load(disk, A) == 0
    disk.close()
    if other is not None:
        assert load(other, B) == len(B), "the file of another store is removed"
        assert states_of(other) == {}
        assert other.damaged == 0
        other.close()
    else:
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("again", [False, True], ids=["renamed", "made again"])
def test_a_folder_that_is_renamed_while_it_is_open_keeps_what_it_has(again: bool, tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "store")
    for ids in (A, A2, B):
        assert save(disk, ids)
    (tmp_path / "store").rename(tmp_path / "there")
    other = disk_of(tmp_path / "store") if again else None
    if other is not None:
        assert save(other, B)
    assert load(disk, A2) == 0
    assert "removed, or replaced" in disk.problem
    assert disk.damaged == 0
    (tmp_path / "store").rename(tmp_path / "elsewhere") if again else None
    (tmp_path / "there").rename(tmp_path / "store")
    assert load(disk, A2) == len(A2), "it is back"
    (tmp_path / "store").rename(tmp_path / "there")
    assert load(disk, A2) == 0
    disk.close()
    if other is not None:
        other.close()
    disk = disk_of(tmp_path / "there")
    assert (load(disk, A2), load(disk, B), disk.damaged) == (len(A2), len(B), 0)
    disk.close()


# Killed


def chat(number: int, tokens: int) -> list[int]:
    """The ids of a conversation, so far; they do not depend on when it was interrupted."""
    rng = random.Random(number)
    return [rng.randrange(5) for _ in range(tokens)]


def go_on(folder: Path, budget: int | None, seed: int, tell: int) -> None:
    """Turns of some conversations, each told when it is saved."""
    rng, disk = random.Random(seed), disk_of(folder, budget)
    states = states_of(disk)
    while True:
        name = rng.choice(list(states) if len(states) > 20 else [*states, f"{rng.randrange(10**6)}"])
        tokens = states.get(name, {"tokens": 0})["tokens"] + rng.randint(1, 60)
        states[name] = {"tokens": tokens}
        load(disk, chat(int(name), tokens))
        assert save(disk, chat(int(name), tokens)), disk.problem
        disk.save_conversation(name, states[name])
        os.write(tell, f"{name} {tokens}\n".encode())
        if tokens > 400:
            disk.drop_conversation(name)
            del states[name]


@pytest.mark.parametrize("budget", [None, 150_000], ids=["saving", "evicting"])
def test_a_process_that_is_killed_at_any_moment_loses_nothing_that_it_said_was_saved(
    budget: int | None, tmp_path: Path
) -> None:
    rng, told, partly = random.Random(int(os.environ.get("KVTIER_TEST_SEED", "1"))), dict[str, int](), 0
    for kill in range(KILLS):
        hear, tell = os.pipe()
        child = os.fork()  # it imports nothing, so that it is killed while it writes
        if not child:
            try:
                go_on(tmp_path, budget, kill, tell)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(tell)
        first, saves = b"", rng.randint(1, 40)
        while first.count(b"\n") < saves and (more := os.read(hear, 4096)):
            first += more  # by what was saved, so that a slow machine has to make room too
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it ended by itself"
        with os.fdopen(hear, "rb") as stream:
            lines = [(x.split()[0].decode(), int(x.split()[1])) for x in (first + stream.read()).splitlines()]
        told |= dict(lines)
        looked_at = dict(lines) | dict(rng.sample(sorted(told.items()), min(len(told), 30)))
        disk = disk_of(tmp_path, budget)
        assert disk.damaged == 0
        states = states_of(disk)
        for name, tokens in looked_at.items():
            there = load(disk, chat(int(name), tokens))
            assert there == tokens or (budget and name != lines[-1][0])
            partly += there < tokens
            assert name not in states or states[name]["tokens"] >= tokens
        assert (disk.damaged, disk.problem) == (0, "")
        disk.check_integrity()
        disk.close()
        files = sorted(tmp_path.glob("*.safetensors*"))
        assert {int(x.name[:12]) for x in files} == set(disk._chunks.numbers), "files without rows are left"
        assert sum(x.stat().st_size for x in files) <= (budget or 10**9)
    assert bool(partly) == bool(budget), "nothing had to make room"


# Conversations


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_conversations_that_cannot_be_read_are_not_replaced_by_new_ones(done: bool, tmp_path: Path) -> None:
    """A store that went on without them would save an empty one under the name of each."""
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model, directory=tmp_path) as store:
        store.open("c").send("Who?", tokenizer=tokenizer, do_sample=False, max_new_tokens=1)
        messages = store.open("c").messages
    gc.collect()  # what other tests have left
    before, at, refused = handles(), 0, 0
    while True:
        with failing(at, errno.EIO, done) as left:
            try:
                store = store_of(model, directory=tmp_path)
            except (ConfigError, StoreInUseError):
                refused += 1
            else:
                try:
                    assert store.open("c").messages == messages, at
                except ConfigError:
                    refused += 1
                finally:
                    store.close()
        gc.collect()
        assert handles() == before
        with store_of(model, directory=tmp_path) as store:
            assert store.open("c").messages == messages, at
        if left[0] >= 0:
            break
        at += 1
    assert refused > 10


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("again", [False, True], ids=["at the end", "with the next one"])
def test_a_conversation_that_could_not_be_forgotten_is_forgotten_later(done: bool, again: bool, tmp_path: Path) -> None:
    with failing(10**9, errno.EIO, done, lasting=10) as left:
        disk = disk_of(tmp_path)
        for name in "abc":
            disk.save_conversation(name, {"ids": [1]})
        left[0] = 0
        disk.drop_conversation("a")
        assert "'a' was not removed" in disk.problem
        left[0] = 0
        disk.drop_conversation("b")
        left[0] = 10**9
        disk.save_conversation("b", {"ids": [2]})
        if again:
            disk.drop_conversation("c")
            assert list(disk.names()) == ["b"]
        disk.close()
    disk = disk_of(tmp_path)
    assert states_of(disk) == ({"b": {"ids": [2]}} if again else {"b": {"ids": [2]}, "c": {"ids": [1]}})
    disk.close()


def test_a_full_disk_says_which_conversation_was_not_saved_whatever_else_is_not(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    pages = disk._manifest._pragma("page_count")
    disk._manifest.db.execute(f"PRAGMA max_page_count={pages}")
    assert not disk.save_conversation("alice", {"ids": list(range(10_000))})
    disk.save_prices("machine", {"loads": "x" * 100_000})
    assert "full" in disk.problem
    assert "alice" in disk.problem
    disk.close()
