"""What the page cache has of a file goes where it belongs, with checksums of all segments; what it has not is said."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.cpu.cached import CachedFile, can_read_cached

pytestmark = pytest.mark.skipif(not can_read_cached(), reason="not on this system or CPU")
NBYTES = 600_000


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file that is on the disk, open, and its bytes."""
    data = random.Random(0).randbytes(NBYTES)
    (tmp_path / "x").write_bytes(data)
    handle = os.open(tmp_path / "x", os.O_RDWR)
    os.fsync(handle)
    yield handle, data
    os.close(handle)


def sums_of(data: bytes, segment: int) -> bytes:
    return b"".join(zlib.crc32(data[at : at + segment]).to_bytes(4, "little") for at in range(0, len(data), segment))


@pytest.mark.parametrize("segment", [1000, 4096, 99_991, 2**24])
def test_bytes_of_all_heads_go_to_their_pieces(segment: int, written: tuple[int, bytes]) -> None:
    (handle, data), rng = written, random.Random(segment)
    for _ in range(20):
        file, begin = CachedFile(handle, NBYTES, segment), 0
        while begin < NBYTES:
            heads = rng.choice((1, 1, 2, 7))
            sizes = [rng.choice((1, 3, 100, 4096, 20_000)) for _ in range(rng.randrange(1, 9))]
            nbytes = heads * sum(sizes)
            if begin + nbytes > NBYTES:
                heads, sizes, nbytes = 1, [NBYTES - begin], NBYTES - begin
            # Of every head, each piece has a place of its own with something between.
            stride = sum(sizes) + 5 * len(sizes)
            into, ends = torch.full((heads * stride,), 7, dtype=torch.uint8), [0]
            for size in sizes:
                ends.append(ends[-1] + size + 5)
            places = [(into.data_ptr() + at, size) for at, size in zip(ends, sizes, strict=False)]
            # A system drops pages when it likes.
            assert any(file.read(places, heads, stride) or file.bring(nbytes) for _ in range(100))
            got = b"".join(
                bytes(into[head * stride + at : head * stride + at + size].numpy())
                for head in range(heads)
                for at, size in zip(ends, sizes, strict=False)
            )
            assert got == data[begin : begin + nbytes]
            assert int((into == 7).sum()) >= 5 * heads * len(sizes)
            begin += nbytes
            assert file.at == begin
            assert file.sums == sums_of(data[:begin], segment)


def test_what_is_not_there_is_said_and_read_once_it_is_brought(written: tuple[int, bytes]) -> None:
    handle, data = written
    for at in (0, 300_000):
        os.posix_fadvise(handle, at, 0, os.POSIX_FADV_DONTNEED)
        file, into = CachedFile(handle, NBYTES, 99_991), torch.zeros(NBYTES, dtype=torch.uint8)
        file.read([(into.data_ptr(), 100)])
        begin = file.at
        pieces = [(into.data_ptr() + begin, NBYTES - begin)]
        if file.read(pieces):
            pytest.skip("a file system that does not drop pages")
        assert file.at == begin
        file.bring(NBYTES - begin)
        assert file.read(pieces)
        assert bytes(into.numpy()) == data
        assert file.sums == sums_of(data, 99_991)


def test_a_file_that_ends_early_has_no_more(written: tuple[int, bytes]) -> None:
    handle, data = written
    os.ftruncate(handle, 1000)
    file = CachedFile(handle, NBYTES, 4096)
    assert file.take(900) == data[:900]
    assert file.take(101) is None
    file.bring(101)  # ends
    assert file.take(101) is None
    assert file.take(100) == data[900:1000]
    assert file.sums == sums_of(data[:1000], 4096)
