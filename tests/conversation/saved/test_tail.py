"""A head is computed while the tail of what is saved is loaded: the tokens, and what is re-used."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from families import tiny_model
from settled import only
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import BudgetError, ConfigError, Policy
from kvtier.conversation.calls import prefix_reuse
from kvtier.conversation.disk import reading as reading_module
from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.saved import archive
from kvtier.planning.reports.log import Logged, replay
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix

BLOCK = 8
#: Tokens of a file.
FILE = 20


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history is many files, each `FILE` tokens of a tiny llama."""
    token_bytes = archive._token_bytes

    def in_portions(cache: Any) -> int:
        nbytes = token_bytes(cache)
        monkeypatch.setattr(archive, "LARGEST", nbytes * FILE)
        return nbytes

    monkeypatch.setattr(archive, "_token_bytes", in_portions)


def choosing(monkeypatch: pytest.MonkeyPatch, choose: Callable[[int, int], int]) -> None:
    """Let tails begin where `choose` says, given the length of what is saved and the tokens that are in memory."""

    def chosen(self: LoadOrCompute, saved: SavedPrefix) -> int:
        return 0 if saved.step is None else choose(saved.length, saved.past)

    monkeypatch.setattr(LoadOrCompute, "choose", chosen)


def saved(model: Any, at: Path, tokens: int) -> torch.Tensor:
    """A history that is on the disk, and in no memory."""
    with store_of(model, directory=at) as store:
        history: torch.Tensor = store.generate(**ones(some_ids(tokens)), **GREEDY)
    return history


@pytest.mark.parametrize("device_budget", [None, "64KiB"], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "falcon"])
@pytest.mark.parametrize("start", [8, 24, 136])
def test_the_head_is_computed_and_the_tail_is_loaded(
    start: int, name: str, device_budget: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    history = saved(model, tmp_path / "saved", 160)
    choosing(monkeypatch, lambda length, past: start)
    for n, options in enumerate(({}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2})):
        at = shutil.copytree(tmp_path / "saved", tmp_path / f"{n}")
        with store_of(model, directory=at, loading="auto", device_budget=device_budget) as store:
            inputs = ones(grown(history, 7, seed=start))
            out = store.generate(**inputs, **GREEDY, **options)
            assert torch.equal(out, fresh(model, inputs, **options))
            reuse = store.reuse[0]
            assert (reuse.cached, reuse.loaded) == (history.shape[1] - 1 - start,) * 2
            assert (reuse.computed, reuse.why) == (start + 8, "")
            again = ones(grown(out[:1], 3, seed=9))
            assert torch.equal(store.generate(**again, **GREEDY), fresh(model, again))
            assert store.reuse[0].cached >= out.shape[1] - 1 - 5 * len(options)
            store.check_integrity()
            assert store.stats.problem == ""
            assert store.memory.conceding == store.memory.conceding[:1], "only the waker is left"


@pytest.mark.parametrize("here", [24, 40, 96])
def test_what_is_in_memory_is_not_read_again(here: int, tmp_path: Path) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    read: list[int] = []
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(history[:, :here]), max_new_tokens=1)
        store.drop(history[0].tolist(), here, history.shape[1])
        before = threading.enumerate()
        count_reads(store, read)
        inputs = ones(grown(history, 7))
        out = store.generate(**inputs, **GREEDY)
        assert torch.equal(out, fresh(model, inputs))
        assert store.reuse[0].cached == history.shape[1] - 1
        assert store.reuse[0].loaded == history.shape[1] - 1 - here
        # Files begin at multiples of their length; the prompt was one call, and its answer another file.
        assert read == [x for x in range(0, 165, FILE) if x + FILE > here]
        assert len(set(threading.enumerate()) - set(before)) <= 1
        store.check_integrity()


def count_reads(store: Any, into: list[int]) -> None:
    reader = store._disk_tier.disk._reader

    def counting(read: Any) -> Any:
        def counted(chunk: Chunk, where: Any) -> Any:
            found = read(chunk, where)
            if found is not False:  # else it is read another way
                into.append(chunk.start)
            return found

        return counted

    reader._read, reader._read_straight = counting(reader._read), counting(reader._read_straight)


def test_what_is_in_the_middle_of_a_block_is_read_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(history[:, :30]), max_new_tokens=1)
        inputs = ones(grown(history, 7))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].loaded == history.shape[1] - 1
        assert store.stats.sequences == 1
        store.check_integrity()


def test_a_damaged_tail_is_computed_from_there_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    files = sorted(tmp_path.glob("*.safetensors"))
    content = bytearray(files[5].read_bytes())
    content[-3] ^= 1
    files[5].write_bytes(content)
    choosing(monkeypatch, lambda length, past: 48)
    with store_of(model, directory=tmp_path, loading="auto") as store:
        inputs = ones(grown(history, 7))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].loaded == store.reuse[0].cached == 5 * FILE - 48
        assert store.stats.damaged == 1
        store.check_integrity()


@pytest.mark.parametrize("damaged", [1, 2], ids=["its first file", "all before it"])
def test_a_tail_that_cannot_be_read_at_all_is_computed(
    damaged: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    sorted(tmp_path.glob("*.safetensors"))[2 if damaged == 1 else 3].write_bytes(b"")
    choosing(monkeypatch, lambda length, past: 48 if damaged == 1 else 64)
    with store_of(model, directory=tmp_path, loading="auto") as store:
        inputs = ones(grown(history, 7))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert (store.reuse[0].cached, store.reuse[0].loaded) == (0, 0)
        assert store.reuse[0].why == "what is saved cannot be read"
        store.check_integrity()


@pytest.mark.parametrize("straight", [True, False], ids=["straight", "through buffers"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=lambda x: x.__name__)
def test_a_head_that_is_cut_short_ends_the_load(
    error: type[BaseException], straight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    choosing(monkeypatch, lambda length, past: 80)
    reading, go_on = threading.Event(), threading.Event()
    restore, reserve, restored = archive._restore, archive._Blocks.reserve, list[int]()

    def hold(start: int) -> None:
        restored.append(start)
        reading.set()
        assert go_on.wait(120)

    def held(cache: Any, part: Any, device: Any) -> bool:
        hold(part.start)
        return restore(cache, part, device)

    def held_straight(self: Any, *args: Any) -> bool:
        hold(80 + self._written)
        return reserve(self, *args)

    def cut_short(self: Any, *args: Any) -> None:
        assert reading.wait(120)
        threading.Timer(0.05, go_on.set).start()
        raise error

    before = threading.enumerate()
    with store_of(model, directory=tmp_path, loading="auto") as store:
        with monkeypatch.context() as patch:
            patch.setattr(archive, "_restore", held)
            patch.setattr(archive._Blocks, "reserve", held_straight)
            if not straight:
                patch.setattr(reading_module, "seems_cached", lambda *args: False)
            patch.setattr(prefix_reuse.PrefixReuse, "_forward", cut_short)
            with pytest.raises(error):
                store.generate(**ones(grown(history, 7)), **GREEDY)
        assert restored == [80], "it ends behind the file that was being read"
        inputs = ones(grown(history, 9))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        store.check_integrity()
    assert only(before)


def test_who_is_refused_room_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head needs what the tail has claimed: the load ends, and the call goes on."""
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    choosing(monkeypatch, lambda length, past: 80)
    reading, forward, reserve = threading.Event(), prefix_reuse.PrefixReuse._forward, archive._Blocks.reserve

    def noted(*args: Any) -> bool:
        reading.set()
        return reserve(*args)

    def behind(self: Any, *args: Any) -> None:
        assert reading.wait(120)
        forward(self, *args)

    inputs = ones(grown(history, 7))
    least, named = 8 * 2**10, [8 * 2**10]
    with store_of(model, host_budget=least) as store:
        while len(named) < 20:
            try:
                store.generate(**inputs, **GREEDY)
                break
            except BudgetError as refused:  # names what its next step needs
                least = refused.needed
                named.append(least)
                store.memory.resize(host_budget=least)
    assert 1 < len(named) < 20
    assert named == sorted(set(named)), "a budget that is named is larger than the one that was refused"
    monkeypatch.setattr(archive._Blocks, "reserve", noted)
    monkeypatch.setattr(prefix_reuse.PrefixReuse, "_forward", behind)
    for budget in (least, least * 5 // 4, least * 3 // 2, 2 * least):
        with store_of(model, directory=tmp_path, loading="auto", host_budget=budget) as store:
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs)), budget
            store.check_integrity()


def test_without_a_thread_the_tail_is_loaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    choosing(monkeypatch, lambda length, past: 80)
    with store_of(model, directory=tmp_path, loading="auto") as store:
        inputs = ones(grown(history, 7))
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.conversation.saved.tail.ThreadPoolExecutor.submit", no_thread)
            out = store.generate(**inputs, **GREEDY)
        assert torch.equal(out, fresh(model, inputs))
        assert store.reuse[0].loaded == store.reuse[0].cached == history.shape[1] - 1 - 80
        assert len(store.memory.conceding) == 1
        store.check_integrity()


def no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("seed", range(3))
def test_wherever_the_tail_begins_the_tokens_are_those_of_a_new_cache(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    model = tiny_model(draw.choice(("llama", "gpt2", "deepseek_v3")))
    history = saved(model, tmp_path, draw.randrange(60, 200))
    starts: list[int] = []

    def some(length: int, past: int) -> int:
        ways = [0, length, *range(-(-past // BLOCK) * BLOCK, length, BLOCK)]
        starts.append(draw.choice(ways))
        return starts[-1]

    choosing(monkeypatch, some)
    for turn in range(5):
        budget = draw.choice(("64MiB", "300KiB"))
        options: dict[str, Any] = {"loading": "auto", "host_budget": budget, "audit": "full"}
        with store_of(model, directory=tmp_path, **options) as store:
            for n in range(3):
                keep = draw.randrange(1, history.shape[1])
                if draw.random() < 0.5:
                    store.drop(history[0].tolist(), keep, history.shape[1])
                inputs = ones(grown(history, draw.randrange(1, 9), seed=turn))
                out = store.generate(**inputs, **GREEDY)
                assert torch.equal(out, fresh(model, inputs)), (turn, n, starts)
                store.check_integrity()
            history = out
    assert starts


def test_of_a_chain_only_the_files_behind_a_token_are_read(tmp_path: Path) -> None:
    model, read = tiny_model("llama"), list[int]()
    history = saved(model, tmp_path, 160)
    with store_of(model, directory=tmp_path) as store:
        count_reads(store, read)
        disk: Disk = store._disk_tier.disk
        last = max(disk._chunks, key=lambda chunk: chunk.stop)
        for start in (0, 1, FILE - 1, FILE, FILE + 1, 100, history.shape[1] - 2):
            parts = [(x.start, x.stop, x.tensors["k.0"].shape[1]) for x in disk.read(last, last.stop, start)]
            assert [n for *_, n in parts] == [stop - first for first, stop, _ in parts]
            assert [first for first, *_ in parts] == [start, *(stop for _, stop, _ in parts[:-1])]
            assert parts[-1][1] == last.stop
            assert read == [x for x in range(0, last.stop, FILE) if x + FILE > start]
            read.clear()


def test_a_new_process_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path, loading="auto") as store:
        history = store.generate(**ones(some_ids(160)), **GREEDY)
        store.flush()
        store.clear()
        store.generate(**ones(history), **GREEDY)
        assert store.reuse[0].loaded
        learned = store._disk_tier._prices
        assert learned.seconds_to_load(10**6) is not None
    with store_of(model, directory=tmp_path, loading="auto") as store:
        found = store._disk_tier._prices
        assert found is not learned
        assert found.as_json() == learned.as_json()
        store._disk_tier.disk.save_prices(store._disk_tier._machine, {"loads": "x"})
        store._disk_tier._saved_prices = found.as_json()  # nothing new
    with store_of(model, directory=tmp_path, loading="auto") as store:
        assert store._disk_tier._prices.seconds_to_load(10**6) is None, "what is damaged is learned again"
        inputs = ones(grown(history))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))


class LoadsFrom(Policy):
    """Answers with what it was made of, and keeps the questions."""

    def __init__(self, *answers: object) -> None:
        super().__init__()
        self.answers, self.asked = list(answers), list[SavedPrefix]()

    def load_from(self, learned: LoadOrCompute, saved: SavedPrefix) -> int:
        self.asked.append(saved)
        return cast(int, self.answers.pop(0))


class ComputesAll(Policy):
    def load_from(self, learned: LoadOrCompute, saved: SavedPrefix) -> int:
        return saved.length


@pytest.mark.parametrize("start", [0, 24, 160])
def test_the_policy_of_the_memory_decides_from_where_to_load(start: int, tmp_path: Path) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    length = history.shape[1] - 1
    policy = LoadsFrom(length if start == 160 else start)
    with store_of(model, directory=tmp_path, loading="auto", policy=policy) as store:
        inputs = ones(grown(history, 7))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].loaded == (0 if start == 160 else length - start)
    (asked,) = policy.asked
    assert (asked.length, asked.past, asked.more, asked.step, asked.batch) == (length, 0, 8, 8, 1)


@pytest.mark.parametrize("answer", [-1, 7, 25, 1000, "all", None, 1.5])
def test_an_answer_from_where_nothing_can_be_loaded_is_refused_and_the_store_goes_on(
    answer: object, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    with store_of(model, directory=tmp_path, loading="auto", policy=LoadsFrom(answer, 24)) as store:
        inputs = ones(grown(history, 7))
        with pytest.raises(ConfigError, match="load_from"):
            store.generate(**inputs, **GREEDY)
        store.check_integrity()
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].loaded == history.shape[1] - 1 - 24


def test_what_a_store_decides_to_load_is_in_the_log_and_is_decided_again_in_the_same_way(tmp_path: Path) -> None:
    model, log = tiny_model("llama"), tmp_path / "decisions.jsonl"
    history = saved(model, tmp_path / "saved", 160)
    policy = Logged("default", log)
    for part in (0, 40, 100):  # what is in memory; the last two times something is known
        with store_of(model, directory=tmp_path / "saved", loading="auto", policy=policy) as store:
            if part:
                store.generate(**ones(history[:, :part]), max_new_tokens=1)
                store.drop(history[0].tolist(), part, history.shape[1])
            inputs = ones(grown(history, 7))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
    policy.close()
    found = replay(log, "default")
    assert found.kinds["load_from"] >= 3, str(found)
    assert not found.differences, str(found)
    assert any('"loads":[[' in line for line in log.read_text().splitlines()), "nothing was known in any"
    otherwise = replay(log, ComputesAll())
    assert ("load_from", 0, history.shape[1] - 1) in [x[1:] for x in otherwise.differences]
    assert {kind for _, kind, *_ in otherwise.differences} == {"load_from"}


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_a_load_begins_leaves_nobody_who_loads(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    history = saved(model, tmp_path, 160)
    choosing(monkeypatch, lambda length, past: 80)
    submit, before = ThreadPoolExecutor.submit, threading.enumerate()

    def interrupted(pool: ThreadPoolExecutor, *args: Any) -> Any:
        if when == "behind":
            submit(pool, *args)
        raise KeyboardInterrupt

    with store_of(model, directory=tmp_path, loading="auto") as store:
        inputs = ones(grown(history, 7))
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.conversation.saved.tail.ThreadPoolExecutor.submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.generate(**inputs, **GREEDY)
        assert len(store.memory.conceding) == 1
        assert not any(x.name.startswith("kvtier-loading") for x in threading.enumerate())
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        store.check_integrity()
    assert only(before)
