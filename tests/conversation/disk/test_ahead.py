"""Reading ahead: in order, one thread and two buffers, and nothing is left behind however it ends."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier.conversation.disk.files import files
from kvtier.conversation.disk.files.ahead import read_ahead
from kvtier.conversation.disk.files.files import Buffer, read_tensors, write_tensors


def reading() -> list[threading.Thread]:
    return [x for x in threading.enumerate() if x.name.startswith("kvtier-reading")]


def counting(number: int, of: list[tuple[int, Buffer, bool]]) -> Callable[[Buffer], int]:
    def read(buffer: Buffer) -> int:
        of.append((number, buffer, threading.current_thread() in reading()))
        return number

    return read


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_all_come_in_order_in_two_buffers_of_one_thread(count: int) -> None:
    of: list[tuple[int, Buffer, bool]] = []
    for n, got in enumerate(read_ahead([counting(n, of) for n in range(count)])):
        assert got == n
        assert len(reading()) == (count > 1)
    assert [n for n, _, _ in of] == list(range(count))
    assert len({id(buffer) for _, buffer, _ in of}) == min(count, 2)
    assert all(a[1] is not b[1] for a, b in itertools.pairwise(of)), "what is used is read over"
    assert [elsewhere for *_, elsewhere in of] == [n > 0 for n in range(count)]
    assert not reading()


def test_the_next_one_is_read_while_one_is_used_and_no_other_one() -> None:
    began = [threading.Event() for _ in range(4)]

    def read(n: int) -> Callable[[Buffer], int]:
        def now(buffer: Buffer) -> int:
            began[n].set()
            return n

        return now

    for n in read_ahead([read(n) for n in range(4)]):
        if n < 3:
            assert began[n + 1].wait(120), "it is read only when it is asked for"
        assert not any(x.wait(0.05) for x in began[n + 2 :]), "it is read into what is used"


def test_an_error_comes_in_its_turn_and_nothing_is_read_behind_it() -> None:
    of: list[tuple[int, Buffer, bool]] = []

    def fails(buffer: Buffer) -> int:
        raise OSError("gone")

    reads = [counting(0, of), counting(1, of), fails, counting(3, of)]
    parts = read_ahead(reads)
    assert [next(parts), next(parts)] == [0, 1]
    with pytest.raises(OSError, match="gone"):
        next(parts)
    assert [n for n, *_ in of] == [0, 1]
    assert not reading()


def test_without_a_thread_to_be_had_the_caller_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    of: list[tuple[int, Buffer, bool]] = []
    assert list(read_ahead([counting(n, of) for n in range(5)])) == list(range(5))
    assert [n for n, *_ in of] == list(range(5)), "something is read twice"
    assert not any(elsewhere for *_, elsewhere in of)


@pytest.mark.parametrize("fails", [1, 2, 3, 9])
def test_what_the_caller_reads_for_want_of_a_thread_is_read_by_no_other_later(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool keeps what it has no thread for: a thread that comes later would read it into what is used."""
    start, left = threading.Thread.start, [fails]

    def sometimes(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    of: list[tuple[int, Buffer, bool]] = []
    for _ in read_ahead([counting(n, of) for n in range(7)]):
        threading.Event().wait(0.02)
    assert [n for n, *_ in of] == list(range(7)), "something is read twice"


def test_a_read_that_nobody_waits_for_any_more_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pieces, second = tmp_path / "x", [0], threading.Event()
    nbytes, sums = write_tensors(file, {"k.0": torch.zeros(2**16, dtype=torch.uint8)}, "")
    monkeypatch.setattr(files, "_PIECE", 64)
    readv = os.readv

    def slow(handle: int, into: list[memoryview]) -> int:
        if reading():
            pieces[0] += 1
            second.set()
            threading.Event().wait(0.01)
        return int(readv(handle, into))

    monkeypatch.setattr(os, "readv", slow)
    parts = read_ahead([lambda buffer: 0, lambda buffer: read_tensors(file, nbytes, sums, buffer)])
    next(parts)
    assert second.wait(120)
    parts.close()
    assert pieces[0] < 500 < nbytes // 64
    assert not reading()


def test_a_default_device_has_no_part_in_what_is_read(tmp_path: Path) -> None:
    wrote = torch.arange(6.0)
    nbytes, sums = write_tensors(tmp_path / "file", {"x": wrote}, "")
    with torch.device("meta"):
        read, _ = read_tensors(tmp_path / "file", nbytes, sums)
    assert torch.equal(read["x"], wrote)
