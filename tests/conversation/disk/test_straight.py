"""What the system has in memory of a file goes straight into blocks, and is what was written, or is not used at all."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import OF
from test_ahead import reading
from test_load_room import CONFIG, HEAD, HEADS, LAYERS, load_of

from kvtier import BudgetError, TieredMemory
from kvtier.conversation.disk import reading as reading_module
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files import straight
from kvtier.conversation.index import packed
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.saved.archive import Archive
from kvtier.cpu import cached
from kvtier.cpu.cached import CachedFile
from kvtier.forward.forward import Forward
from kvtier.hf.models.devices import Devices

FLIPS = int(os.environ.get("KVTIER_TEST_FLIPS", "60"))

pytestmark = pytest.mark.skipif(not cached.can_read_cached(), reason="not on this system or CPU")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredMemory]:
    """Everything has gone at the end."""
    memory = TieredMemory()
    yield memory
    monkeypatch.undo()
    assert memory.stats.host.used_blocks == 0
    assert not reading()
    memory.check_integrity()
    memory.close()


@pytest.fixture(autouse=True)
def segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several segments, whose ends are anywhere within tensors."""
    from kvtier.conversation.disk.files import files

    for module in (files, straight):
        monkeypatch.setattr(module, "SEGMENT", 1000)


@pytest.fixture
def went(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each file that was tried, whether it went straight into blocks."""
    found, read = list[bool](), straight.read_straight

    def noted(*args: Any) -> bool:
        found.append(read(*args))
        return found[-1]

    monkeypatch.setattr(reading_module, "read_straight", noted)
    return found


def saved(folder: Path, lengths: list[int]) -> Disk:
    """A chain of chunks, whose keys and values tell layer and token."""
    disk, parent, begin = Disk(folder, None, OF), None, 0
    for n in lengths:
        at = torch.arange(begin, begin + n, dtype=torch.float32)[None, :, None]
        tensors = {
            f"{x}.{i}": (at + 1000 * i + (0.5 if x == "v" else 0)).expand(HEADS, n, HEAD)
            for i in range(LAYERS)
            for x in "kv"
        }
        begin += n
        parent = disk.write("k", packed([1] * begin), begin - n, parent, tensors, "")
        assert parent is not None
    return disk


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_chains_of_any_lengths_are_in_blocks_of_any_size(
    block_size: int, tmp_path: Path, memory: TieredMemory, went: list[bool]
) -> None:
    rng, tried = random.Random(block_size), 0
    for n in range(12):
        lengths = [rng.choice((2, 3, 5, 16, 17, 63, 64, 65, 130)) for _ in range(rng.randrange(2, 7))]
        disk = saved(tmp_path / f"{n}", lengths)
        assert load_of(disk, memory, sum(lengths), block_size=block_size) == sum(lengths)
        tried += len(lengths)
        disk.close()
    assert went == [True] * tried


def test_what_another_chunk_continues_before_its_end_is_read_as_others_are(
    tmp_path: Path, memory: TieredMemory, went: list[bool]
) -> None:
    disk = saved(tmp_path, [40, 40, 40])
    at = torch.arange(100, 160, dtype=torch.float32)[None, :, None].expand(HEADS, 60, HEAD)
    tensors = {f"{x}.{i}": at + 1000 * i + (0.5 if x == "v" else 0) for i in range(LAYERS) for x in "kv"}
    _, chunk = disk.find("k", packed([1] * 120))
    assert disk.write("k", packed([1] * 100 + [2] * 60), 100, chunk, tensors, "") is not None
    archive = Archive(disk, lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    with JournalledCache(CONFIG, memory=memory) as cache:
        length, end = archive.find("k", packed([1] * 100 + [2] * 60), stateful=False)
        assert end is not None
        assert archive.load(cache, end, length) == (160, None)
        keys, values = cache.layers[1].dense("test")
        assert torch.equal(keys[0, 0, :, 0], torch.arange(160) + 1000.0)
        assert torch.equal(values, keys + 0.5)
    assert went == [True, True], "the chunk that is not of use to its end was not to be tried"
    disk.close()


def test_a_default_device_has_no_part_in_blocks_that_are_read_into(
    tmp_path: Path, memory: TieredMemory, went: list[bool]
) -> None:
    disk = saved(tmp_path, [40, 40, 40])
    archive = Archive(disk, lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    with JournalledCache(CONFIG, memory=memory) as cache:
        length, end = archive.find("k", packed([1] * 120), stateful=False)
        assert end is not None
        with torch.device("meta"):  # holds no numbers: whatever is made there shows
            assert archive.load(cache, end, length) == (120, None)
        keys, _ = cache.layers[1].dense("test")
        assert torch.equal(keys[0, 0, :, 0].cpu(), torch.arange(120, device="cpu") + 1000.0)
    assert went == [True] * 3
    disk.close()


@pytest.mark.parametrize("brought", [True, False])
def test_what_is_not_in_memory_is_brought_or_read_as_others_are(
    brought: bool, tmp_path: Path, memory: TieredMemory, went: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each read in turn, as if a page had gone, until it is brought back."""
    disk, read, bring = saved(tmp_path, [33, 33, 50]), CachedFile.read, CachedFile.bring
    for at in range(3 * (2 + 2 * LAYERS)):
        left, there = [at], [True]

        def reads(self: CachedFile, *args: Any, left: list[int] = left, there: list[bool] = there) -> bool:
            before = self.at, self._crc.value
            found = read(self, *args)
            left[0] -= 1
            if left[0] == -1:
                there[0] = False
            if not there[0]:  # some of it is written
                self.at, self._crc.value = before
            return found and there[0]

        def brings(self: CachedFile, nbytes: int, there: list[bool] = there) -> None:
            there[0] = brought
            bring(self, nbytes)

        monkeypatch.setattr(CachedFile, "read", reads)
        monkeypatch.setattr(CachedFile, "bring", brings)
        went.clear()
        assert load_of(disk, memory, 116) == 116
        assert there[0] is (brought and at % (2 + 2 * LAYERS) > 1)
        assert (went == 3 * [True]) is there[0], "a header that is absent, and what is not brought, is read otherwise"
    assert (disk.damaged, disk.problem) == (0, "")
    disk.close()


def test_a_disk_that_fails_leaves_no_token_that_was_not_read(
    tmp_path: Path, memory: TieredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each read in turn. `load_of` compares what the cache holds with what it was told of."""
    disk, read, ends = saved(tmp_path, [33, 33, 50]), CachedFile.read, set[int]()
    for at in range(3 * (2 + 2 * LAYERS)):
        left = [at]

        def reads(self: CachedFile, *args: Any, left: list[int] = left) -> bool:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.EIO, "the disk fails")
            return read(self, *args)

        monkeypatch.setattr(CachedFile, "read", reads)
        ends.add(load_of(disk, memory, 116))
        assert "the disk fails" in disk.problem
        disk.problem = ""
    assert ends == {0, 33, 66}
    disk.close()


def test_no_flipped_byte_and_no_cut_reaches_a_token(tmp_path: Path, memory: TieredMemory, went: list[bool]) -> None:
    """What is loaded is right, as `load_of` compares, and ends before the file that is damaged."""
    rng, lengths, straight_ones = random.Random(5), [20, 33, 16, 41], 0
    source = tmp_path / "whole"
    saved(source, lengths).close()
    for n in range(FLIPS):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        number = rng.randrange(len(lengths))
        damaged = sorted(folder.glob("*.safetensors"))[number]
        data = bytearray(damaged.read_bytes())
        if rng.random() < 0.8:
            data[rng.randrange(8 if rng.random() < 0.1 else len(data))] ^= 1 << rng.randrange(8)
        else:
            data = data[: rng.randrange(len(data))]
        damaged.write_bytes(bytes(data))
        went.clear()
        disk = Disk(folder, None, OF)
        assert load_of(disk, memory, sum(lengths)) == sum(lengths[:number])
        assert disk.damaged == 1
        assert "is not what was written" in disk.problem or "another size" in disk.problem
        disk.close()
        straight_ones += sum(went)
    assert straight_ones > FLIPS // 2


@pytest.mark.parametrize("what", ["dtype", "heads", "names", "order"])
def test_a_file_of_another_shape_than_what_is_there_is_no_error_here(
    what: str, tmp_path: Path, memory: TieredMemory, went: list[bool]
) -> None:
    """Another version of a model may save otherwise, and whoever reads files in the ordinary way says what is wrong."""
    disk = saved(tmp_path, [20])
    _, parent = disk.find("k", packed([1] * 20))
    at = torch.arange(20, 50, dtype=torch.float32)[None, :, None].expand(HEADS, 30, HEAD)
    tensors = {f"{x}.{i}": at + 1000 * i + (0.5 if x == "v" else 0) for i in range(LAYERS) for x in "kv"}
    if what == "dtype":
        tensors["v.1"] = tensors["v.1"].double()
    elif what == "heads":
        tensors = {name: x[:1] for name, x in tensors.items()}
    elif what == "names":
        tensors["k.7"] = tensors.pop("k.2")
    disk.write("k", packed([1] * 50), 20, parent, tensors, "")
    archive = Archive(disk, lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    with JournalledCache(CONFIG, memory=memory) as cache:
        length, chunk = archive.find("k", packed([1] * 50), stateful=False)
        assert chunk is not None
        try:
            got, _ = archive.load(cache, chunk, length)
        except Exception as error:
            got = type(error).__name__
    assert went == [True, what == "order"]
    assert (got == 50) is (what == "order")
    disk.close()


# Blocks for all files are taken at once


@pytest.mark.parametrize("at", range(LAYERS))
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_cuts_the_taking_of_blocks_short_leaves_none(
    at: int, error: type[BaseException], tmp_path: Path, memory: TieredMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, reserve, left = saved(tmp_path, [33, 33, 50]), Forward.reserve, [at]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error
        reserve(*args)

    monkeypatch.setattr(Forward, "reserve", failing)
    with pytest.raises(error):
        load_of(disk, memory, 116)
    assert not reading()
    assert memory.stats.host.used_blocks == 0
    assert load_of(disk, memory, 116) == 116
    disk.close()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("room", [0, 33, 50, 116])
def test_where_there_is_no_room_for_all_files_each_takes_its_own(
    room: int, layer: int, tmp_path: Path, memory: TieredMemory, went: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any layer may be the one that is refused; the files before the one without room stay."""
    lengths, taken = [33, 33, 50], list[int]()
    disk, reserve = saved(tmp_path, lengths), Forward.reserve

    def refusing(self: Forward, index: int, tokens: int) -> None:
        if index == 0:
            taken.append(tokens)
        if index == layer and tokens > room:
            raise BudgetError("no room", tier="host", needed=2, budget=1)
        reserve(self, index, tokens)

    monkeypatch.setattr(Forward, "reserve", refusing)
    if room:
        assert load_of(disk, memory, 116) == {33: 66, 50: 116, 116: 116}[room]
        assert ("no room" in disk.problem) is (room == 33)
    else:
        with pytest.raises(BudgetError):
            load_of(disk, memory, 116)
    assert taken == {0: [116, 33], 33: [116, 33, 83, 33, 50], 50: [116, 33, 83, 33, 50], 116: [116]}[room]
    disk.close()


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_a_load_that_is_ended_between_two_files_leaves_those_before(
    block_size: int, tmp_path: Path, memory: TieredMemory
) -> None:
    """And the cache goes on from there, in blocks that are not full too."""
    disk = saved(tmp_path, [33, 30, 50])
    archive = Archive(disk, lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    for files in range(4):
        left = [files]

        def go_on(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] >= 0

        with JournalledCache(CONFIG, memory=memory, block_size=block_size) as cache:
            length, chunk = archive.find("k", packed([1] * 113), stateful=False)
            assert chunk is not None
            got, _ = archive.load(cache, chunk, length, go_on=go_on)
            assert got == cache.get_seq_length() == [0, 33, 63, 113][files]
            memory.check_integrity()
            for i in range(LAYERS):
                more = torch.full((1, HEADS, 7, HEAD), 1000.0 * i)
                keys, values = cache.update(more, more + 0.5, i)
                assert torch.equal(keys[0, 0, :got, 0], torch.arange(got) + 1000.0 * i)
                assert torch.equal(values, keys + 0.5)
            memory.check_integrity()
    disk.close()
