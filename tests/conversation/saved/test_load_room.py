"""What is saved is parted into files of a bounded size, and loaded while the next one is read; room for all of it is
there before it begins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import OF
from families import tiny_model
from test_ahead import reading
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of
from transformers import LlamaConfig

from kvtier import BudgetError, TieredMemory
from kvtier.conversation.disk import reading as reading_module
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.index import packed
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.saved import archive as module
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.waiting import Saved
from kvtier.forward.forward import Forward
from kvtier.hf.models.devices import Devices

#: Of a small cache, and bytes of one of its tokens.
LAYERS, HEADS, HEAD = 3, 2, 4
CONFIG = LlamaConfig(
    num_hidden_layers=LAYERS, num_key_value_heads=HEADS, num_attention_heads=HEADS, head_dim=HEAD, hidden_size=8
)
TOKEN = 2 * LAYERS * HEADS * HEAD * 4


def saved_in(folder: Path, chunks: int, each: int) -> Disk:
    """A folder with a chain of chunks of so many tokens, whose keys and values tell layer and token."""
    disk, parent = Disk(folder, None, OF), None
    for n in range(chunks):
        at = torch.arange(n * each, (n + 1) * each, dtype=torch.float32)[None, :, None]
        tensors = {
            f"{x}.{i}": (at + 1000 * i + (0.5 if x == "v" else 0)).expand(HEADS, each, HEAD)
            for i in range(LAYERS)
            for x in "kv"
        }
        parent = disk.write("k", packed([1] * (n + 1) * each), n * each, parent, tensors, "")
        assert parent is not None
    return disk


def load_of(disk: Disk, memory: TieredMemory, length: int, **options: Any) -> int:
    archive = Archive(disk, lambda saved: None, lambda: Devices(torch.device("cpu"), {}))
    with JournalledCache(CONFIG, memory=memory, **options) as cache:
        found, chunk = archive.find("k", packed([1] * length), stateful=False)
        assert chunk is not None
        assert found == length
        got, _ = archive.load(cache, chunk, length)
        assert cache.get_seq_length() == got
        for i in range(LAYERS) if got else ():
            layer = cache._forward.layer(i)
            assert layer is not None
            layer.check_integrity()
            keys, values = cache.layers[i].dense("test")
            assert torch.equal(keys[0, 0, :, 0], torch.arange(got) + 1000.0 * i)
            assert torch.equal(values, keys + 0.5)
    return got


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_long_turn_is_parted_into_files_of_a_bounded_size_unless_it_has_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 20_000)
    model, ids = tiny_model(name), some_ids(300)
    with store_of(model, directory=tmp_path) as store:
        ids = grown(store.generate(**ones(ids), **GREEDY))
    sizes = [x.stat().st_size for x in tmp_path.glob("*.safetensors")]
    if name == "llama":
        assert max(sizes) < 23_000
        assert len(sizes) == -(-sum(sizes) // 20_500), "files are smaller than they may be"
    else:
        assert len(sizes) == 1
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded == ids.shape[1] - 5
    if name == "llama":
        files = sorted(tmp_path.glob("*.safetensors"))
        data = bytearray(files[2].read_bytes())
        data[-1] ^= 1
        files[2].write_bytes(data)
        with store_of(model, directory=tmp_path) as store:
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
            assert 0 < store.reuse[0].loaded < ids.shape[1] - 5, "the files before the damaged one are of use"


def test_what_the_budget_has_no_room_for_makes_nothing_go_though_it_is_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 20_000)
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path, disk_budget=100_000) as store:
        store.generate(**ones(some_ids(60)), **GREEDY)
        store.flush()
        before = sorted(tmp_path.glob("*.safetensors"))
        store.generate(**ones(some_ids(300, seed=1)), **GREEDY)
        store.flush()
        assert "more than the disk budget" in store.stats.problem
        assert sorted(tmp_path.glob("*.safetensors")) == before


def test_a_long_history_that_begins_the_same_gives_room_to_a_new_one(tmp_path: Path) -> None:
    """Each of its turns goes on before the end of the one before, as where a template leaves out some of an answer."""
    model, ids = tiny_model("llama"), some_ids(60)
    with store_of(model, directory=tmp_path) as store:
        for n in range(5):
            out = store.generate(**ones(ids), **GREEDY)
            ids = torch.cat([out[:, :-3], some_ids(60, seed=n + 1)], 1)
        store.flush()
        budget = store.stats.saved_bytes + 20_000
    new = ones(torch.cat([ids[:, :1], some_ids(150, seed=9)], 1))
    with store_of(model, directory=tmp_path, disk_budget=budget) as store:
        store.generate(**new, **GREEDY)
        store.flush()
        assert store.stats.problem == ""
    with store_of(model, directory=tmp_path, disk_budget=budget) as store:
        store.generate(**new, **GREEDY)
        assert store.reuse[0].loaded == 150
        store.generate(**ones(ids[:, :60]), **GREEDY)
        assert store.reuse[0].loaded >= 50, "its beginning is there"


# Interrupted


@pytest.fixture
def through_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded does not go straight into blocks."""
    monkeypatch.setattr(reading_module, "seems_cached", lambda *args: False)


@pytest.mark.parametrize("at", [0, 1, LAYERS, 2 * LAYERS + 1, 4 * LAYERS - 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_cuts_a_load_short_leaves_no_thread_and_no_block(
    at: int, error: type[BaseException], through_buffers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory, restore, left = saved_in(tmp_path, 4, 33), TieredMemory(), Forward.restore, [at]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error
        restore(*args)

    monkeypatch.setattr(Forward, "restore", failing)
    try:
        load_of(disk, memory, 4 * 33)
    except error as caught:  # its frames are alive as long as it is
        assert not reading(), "a thread waits for whoever looks at the error"
        del caught
    else:
        raise AssertionError("nothing was cut short")
    assert memory.stats.host.used_blocks == 0
    monkeypatch.undo()
    assert load_of(disk, memory, 4 * 33) == 4 * 33
    assert (disk.damaged, disk.problem) == (0, "")
    disk.close()
    memory.close()


def test_the_next_file_is_read_while_one_is_written_into_blocks(
    through_buffers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory = saved_in(tmp_path, 4, 33), TieredMemory()
    read, restore, done = reading_module.read_tensors, Forward.restore, [threading.Event() for _ in range(4)]
    count, restored = [0], [0]

    def noted(*args: Any) -> Any:
        found = read(*args)
        done[count[0]].set()
        count[0] += 1
        return found

    def waits(*args: Any) -> None:
        part = restored[0] // LAYERS
        assert part == 3 or done[part + 1].wait(120), "it is read only afterwards"
        restored[0] += 1
        restore(*args)

    monkeypatch.setattr(reading_module, "read_tensors", noted)
    monkeypatch.setattr(Forward, "restore", waits)
    assert load_of(disk, memory, 4 * 33) == 4 * 33
    assert not reading()
    disk.close()
    memory.close()


# Room


def test_a_load_without_room_for_all_of_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    disk = saved_in(tmp_path, 8, 64)
    memory = TieredMemory(host_budget=5 * 64 * TOKEN)
    with pytest.raises(BudgetError):
        load_of(disk, memory, 8 * 64, max_tokens=8 * 64)
    assert memory.stats.host.peak_bytes == 0
    assert load_of(disk, memory, 4 * 64, max_tokens=4 * 64) == 4 * 64
    disk.close()
    memory.close()


def test_a_store_refuses_a_load_without_room_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 10_000)
    model, long, other = tiny_model("llama"), some_ids(300), some_ids(40, seed=3)
    with store_of(model, directory=tmp_path) as store:
        long = grown(store.generate(**ones(long), **GREEDY))
    restored: list[int] = []
    restore = Forward.restore

    def noted(self: Forward, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        restore(self, index, keys, values)
        restored.append(index)

    monkeypatch.setattr(Forward, "restore", noted)
    with store_of(model, directory=tmp_path, host_budget=120_000) as store:
        following = grown(store.generate(**ones(other), **GREEDY))
        with pytest.raises(BudgetError):
            store.generate(**ones(long), **GREEDY)
        assert not restored, "it is begun without room for its end"
        assert torch.equal(store.generate(**ones(following), **GREEDY), fresh(model, ones(following)))
        assert store.reuse[0].cached == following.shape[1] - 5, "what was kept made room in vain"
        assert not reading()


@pytest.mark.parametrize("at", [0, 1, LAYERS, 2 * LAYERS + 1, 4 * LAYERS - 1])
def test_room_that_is_lost_meanwhile_leaves_what_was_loaded(
    at: int, through_buffers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory, append, left = saved_in(tmp_path, 4, 33), TieredMemory(), Forward.append, [at]

    def failing(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise BudgetError("no room", tier="host", needed=2, budget=1)
        return append(*args)

    monkeypatch.setattr(Forward, "append", failing)
    if at < LAYERS:
        with pytest.raises(BudgetError):
            load_of(disk, memory, 4 * 33)
    else:
        assert load_of(disk, memory, 4 * 33) == at // LAYERS * 33
        assert "no room" in disk.problem
    assert memory.stats.host.used_blocks == 0
    assert not reading()
    disk.close()
    memory.close()


# Save


def cache_of(memory: TieredMemory, tokens: int) -> JournalledCache:
    """A cache with the numbers that `load_of` expects."""
    cache = JournalledCache(CONFIG, memory=memory)
    for i in range(LAYERS):
        keys = torch.arange(tokens, dtype=torch.float32)[None, None, :, None] + 1000 * i
        keys = keys.expand(1, HEADS, tokens, HEAD)
        cache._forward.restore(i, keys, keys + 0.5)
    cache._forward.steps.end()
    return cache


@pytest.mark.parametrize("left", [300, 170])
def test_of_a_long_sequence_some_files_at_a_time_are_made_and_a_part_of_a_layer_is_read(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 20 * TOKEN)
    disk, memory, reads, opened = Disk(tmp_path, None, OF), TieredMemory(), list[int](), list[int]()

    def open_cache(saved: Saved) -> JournalledCache:
        """All 300 tokens, and from the second time on what is left of them."""
        opened.append(len(reads))
        return cache_of(memory, 300 if len(opened) == 1 else left)

    def densify(forward: Forward, *args: Any, **options: Any) -> Any:
        keys, values = dense(forward, *args, **options)
        reads.append(keys.nbytes + values.nbytes)
        return keys, values

    dense = Forward.densify
    monkeypatch.setattr(Forward, "densify", densify)
    archive = Archive(disk, open_cache, lambda: Devices(torch.device("cpu"), {}))
    archive.save(Saved("k", packed([1] * 300), None, "k"))
    monkeypatch.undo()
    assert max(reads) <= 20 * TOKEN
    assert len(opened) == 2, "eight files of twenty tokens, and the rest"
    assert load_of(disk, memory, left) == left
    assert disk.problem == ""
    disk.close()
    memory.close()


@pytest.mark.parametrize("left", [66, 50, 33, 20])
def test_of_a_sequence_that_gave_up_its_end_the_rest_is_saved(left: int, tmp_path: Path) -> None:
    disk, memory = saved_in(tmp_path, 1, 33), TieredMemory()
    archive = Archive(disk, lambda saved: cache_of(memory, left), lambda: Devices(torch.device("cpu"), {}))
    archive.save(Saved("k", packed([1] * 66), None, "k"))
    assert disk.find("k", packed([1] * 66))[0] == max(left, 33)
    assert load_of(disk, memory, max(left, 33)) == max(left, 33)
    assert disk.problem == ""
    disk.close()
    memory.close()
