"""Stores with a folder: what many conversations share, what tenants do not, and what is left of a store."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from families import VOCAB, tiny_model
from settled import handles, only, settled
from test_store import GREEDY, Tokenizer, fresh, grown, ones, some_ids, store_of

from kvtier import StoreInUseError
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk import writing
from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.saved import archive, disk_tier
from kvtier.conversation.saved.waiting import Saved
from kvtier.forward.forward import Forward


def saving_threads() -> int:
    return sum(x.name == "kvtier-saving" for x in threading.enumerate())


@pytest.mark.parametrize(
    ("conversations", "tokens"), [(12, 64), pytest.param(1000, 2000, marks=pytest.mark.slow)], ids=["few", "1000"]
)
def test_conversations_on_one_system_prompt_keep_it_once_on_every_tier(
    conversations: int, tokens: int, tmp_path: Path
) -> None:
    model, own = tiny_model("llama"), 3
    shape = model.config
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head * 4
    with store_of(model, directory=tmp_path) as store:

        def taken() -> tuple[int, int]:
            store.flush()
            blocks = store.memory.stats.host.used_blocks // shape.num_hidden_layers
            return blocks * 8 * token, sum(x.stat().st_size for x in tmp_path.glob("*.safetensors"))

        system = some_ids(tokens)
        store.generate(**ones(system), do_sample=False, max_new_tokens=1)
        host, disk = taken()
        assert disk >= tokens * token
        for n in range(conversations):
            # The first token of each is another one, as far as there are others.
            mine = torch.tensor([[1 + n % (VOCAB - 1), 1 + n // (VOCAB - 1) % (VOCAB - 1), 1 + n % 7]])
            store.generate(**ones(torch.cat([system, mine], 1)), do_sample=False, max_new_tokens=1)
            assert store.reuse[0].cached >= tokens - 1
        host, disk = (b - a for a, b in zip((host, disk), taken(), strict=True))
        # On the host a conversation has a block of its own, or the rest of one that is shared and one more.
        assert host <= conversations * 2 * 8 * token, "the system prompt is on the host more than once"
        header = 1000
        assert disk <= conversations * (own * token + header), "the system prompt is on the disk more than once"
        assert store.stats.sequences <= conversations + 1
        store.check_integrity()
    with store_of(model, directory=tmp_path) as store:
        ids = torch.cat(
            [system, torch.tensor([[1 + n % (VOCAB - 1), 1 + n // (VOCAB - 1) % (VOCAB - 1), 1 + n % 7, 5]])], 1
        )
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded == tokens + own


def test_tenants_with_other_salts_find_and_share_nothing_on_the_disk(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), some_ids(60)
    salts = (None, "a", "b", 1, "1", b"1")
    with store_of(model, directory=tmp_path) as store:
        sizes = []
        for salt in salts:
            store.generate(**ones(ids), salt=salt, **GREEDY)
            assert store.reuse[0].cached == 0, salt
            store.flush()
            sizes.append(sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")))
        assert sizes == [sizes[0] * (n + 1) for n in range(len(salts))]
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), salt="c", **GREEDY)
        assert store.reuse[0].cached == 0
        for salt in salts:
            store.generate(**ones(ids), salt=salt, **GREEDY)
            assert store.reuse[0].loaded == 59, salt


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_store_that_is_dropped_while_it_saves_ends_and_leaves_its_folder_to_others(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before, handles = saving_threads(), len(os.listdir("/proc/self/fd"))
    store = store_of(model, directory=tmp_path)
    for seed in range(4):
        store.generate(**ones(some_ids(40, seed=seed)), **GREEDY)
    with pytest.raises(StoreInUseError):
        store_of(model, directory=tmp_path)
    del store
    assert settled(lambda: saving_threads() == before), "the thread that saves keeps a store alive"
    with store_of(model, directory=tmp_path) as store:
        ids = some_ids(40, seed=3)
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.stats.damaged == 0
    del store
    assert settled(lambda: len(os.listdir("/proc/self/fd")) <= handles), "handles are left"


def test_a_call_has_its_answer_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), some_ids(40)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with store_of(model, directory=tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(archive.threading.Thread, "start", start)
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
            assert "can't start new thread" in store.stats.problem
            store.flush()
        store.generate(**ones(ids), **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
        assert store.reuse[0].loaded == 39


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_conversations_that_are_opened_and_closed_leave_nothing(count: int, tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model, directory=tmp_path, host_budget="1MiB", disk_budget=200_000) as store:

        def resident() -> int:
            gc.collect()
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        before, threads = (0, 0), list[threading.Thread]()
        for n in range(count):
            if n == count // 2:
                store.flush()
                before, threads = (handles(), resident()), threading.enumerate()
            chat = store.open(f"{n}")
            chat.send(f"{n} Who?", tokenizer=tokenizer, do_sample=False, max_new_tokens=1)
            chat.close()
        store.flush()
        assert only(threads)
        assert settled(lambda: handles() <= before[0])
        assert resident() - before[1] < 32 * 2**20 + count * 100
        assert store.names == []
        store.check_integrity()


def test_who_opens_a_conversation_waits_for_the_disk_and_lets_others_go_on(tmp_path: Path) -> None:
    """A commit that takes long would stop every call that needs the memory's lock."""
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        store.open("a").generate(**ones(some_ids(20)), **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        committing, opened = store._disk_tier.disk._lock, list[Conversation]()
        with committing:
            opening = threading.Thread(target=lambda: opened.append(store.open("a")))
            opening.start()
            time.sleep(0.2)
            is_free = store.memory.lock.acquire(timeout=60)
            is_waiting = opening.is_alive()
        if is_free:
            store.memory.lock.release()
        opening.join(120)
        assert is_waiting
        assert is_free, "who opens a conversation holds it"
        assert [len(x.ids) for x in opened] == [26]
        assert store.open("a") is opened[0]


def test_who_asks_what_a_store_holds_waits_for_no_commit(tmp_path: Path) -> None:
    """It asks the memory too, and whoever waits for a disk under the memory's lock stops every call."""
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.generate(**ones(some_ids(20)), **GREEDY)
        store.flush()
        assert store._disk_tier is not None
        right, found = store.stats, list[Any]()
        with store._disk_tier.disk._lock:
            asking = threading.Thread(target=lambda: found.append(store.stats))
            asking.start()
            asking.join(120)
            assert found == [right]
        assert right.saved_bytes


@pytest.mark.parametrize(("owner", "name"), [(writing, "write_tensors"), (Manifest, "add")], ids=["a file", "a commit"])
def test_a_process_that_is_forked_while_something_is_saved_closes_its_store_and_the_parent_saves_it(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), some_ids(20)
    begun, ends, call = threading.Event(), threading.Event(), getattr(owner, name)

    def hanging(*args: Any) -> Any:
        begun.set()
        assert ends.wait(240)
        return call(*args)

    monkeypatch.setattr(owner, name, hanging)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
        assert begun.wait(120)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)  # what hangs ends by it
            try:
                store.open("a")
                store.flush()
                store.close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ends.set()
        assert ended == 0
    with store_of(model, directory=tmp_path) as store:
        assert store.names == []
        store.generate(**ones(ids), **GREEDY)
        assert store.reuse[0].loaded == 19


def test_another_tokenizer_finds_nothing_wrong(tmp_path: Path) -> None:
    """Keys and values are found by token ids: what another tokenizer makes of the same words is another sequence."""

    class Other(Tokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
            return [1 + (x * 5 + 1) % (VOCAB - 1) for x in super().apply_chat_template(messages)]

    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        store.open("c").send("Who are you, and why?", tokenizer=Tokenizer(), **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        chat = store.open("c")
        answer = chat.send("And?", tokenizer=Other(), **GREEDY)
        assert store.reuse[0].loaded < 3
        prompt = torch.tensor([chat.ids[: store.reuse[0].prompt]])
        assert answer == Other().decode(fresh(model, ones(prompt))[0, prompt.shape[1] :])


def test_a_process_that_ends_without_closing_its_store_has_saved_its_last_turn(tmp_path: Path) -> None:
    """Not by an abort, which is what a thread within torch ends in when Python ends."""
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from settled import handles, only, settled
from families import tiny_model
from test_store import GREEDY, ones, some_ids, store_of
store = store_of(tiny_model("llama"), directory={str(tmp_path)!r})
for n in range(4):
    store.generate(**ones(some_ids(800, seed=n)), **GREEDY)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-800:]
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        for n in range(4):
            store.generate(**ones(some_ids(800, seed=n)), **GREEDY)
            assert store.reuse[0].loaded == 799


@pytest.mark.parametrize("last", ["store.flush()", "store.close()", ""], ids=["flush", "close", "neither"])
def test_a_turn_at_the_end_of_a_process_is_saved(last: str, tmp_path: Path) -> None:
    """Behind what kvtier does at that end: what is registered first runs last."""
    script = f"""
import atexit, sys
sys.path[:0] = {sys.path!r}

@atexit.register
def late():
    chat = store.open("a")
    assert chat.wake().wait(60)
    chat.generate(**ones(some_ids(400, seed=1)), **GREEDY)
    {last}

from families import tiny_model
from test_store import GREEDY, ones, some_ids, store_of
store = store_of(tiny_model("llama"), directory={str(tmp_path)!r})
store.generate(**ones(some_ids(400)), **GREEDY)
"""
    ended = forks.run(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == ["a"]
        for seed in (0, 1):
            store.generate(**ones(some_ids(400, seed=seed)), **GREEDY)
            assert store.reuse[0].loaded == 399


def test_two_stores_of_one_model_time_each_forward_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, took = tiny_model("llama"), list[Any]()
    with store_of(model, directory=tmp_path) as store, store_of(model):
        assert store._disk_tier is not None
        monkeypatch.setattr(store._disk_tier, "learn", took.extend)
        for _ in range(2):
            store.generate(**ones(some_ids(20)), **GREEDY)
    assert [(x.new, x.past) for x in took] == [
        (20, 0),
        *((1, 20 + n) for n in range(4)),
        *((1, 19 + n) for n in range(5)),
    ]
    assert all(x.seconds > 1e-5 for x in took)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_what_a_turn_reads_to_be_saved_does_not_grow_with_its_history(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    densify = Forward.densify

    def counted(*args: Any, **options: Any) -> Any:
        found = densify(*args, **options)
        if "saving" in args:
            read.append(found[0].untyped_storage().nbytes() // found[0].shape[0])
        return found

    monkeypatch.setattr(Forward, "densify", counted)
    taken = []
    with store_of(tiny_model(name), directory=tmp_path) as store:
        ids = some_ids(40)
        for turn in range(12):
            out = store.generate(**ones(ids), max_new_tokens=4, do_sample=False)
            store.flush()
            taken.append(max(read))
            read.clear()
            ids = torch.cat([out, some_ids(5, seed=turn)], 1)
    assert max(taken[1:]) <= 2 * taken[1], "the whole history is read"
    assert max(taken[1:]) < taken[0]


def test_a_store_that_closes_names_the_conversations_that_the_disk_did_not_take(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        store.open("saved").generate(**ones(some_ids(8)), **GREEDY)
    store = store_of(model, directory=tmp_path)
    assert store._disk_tier is not None
    assert store.open("saved").ids, "what is as it was is not lost"
    store.open("blank")
    manifest = store._disk_tier.disk._manifest
    manifest.db.execute(f"PRAGMA max_page_count={manifest._pragma('page_count')}")
    for n in range(7):
        store.open(f"lost {n}").generate(**ones(some_ids(2000, seed=n)), max_new_tokens=1)
    named = ", ".join(f"'lost {n}'" for n in range(5))
    with pytest.warns(RuntimeWarning, match=f"is lost with this store: {named} and 2 more. .*is full") as found:
        store.close()
    assert len(found) == 1
    store.close()
    with store_of(model, directory=tmp_path) as store:
        assert {*store.names} - {"blank"} == {"saved"}, "one that is blank takes a few bytes, and is nothing to lose"


def test_a_store_whose_folder_was_removed_names_the_conversations_that_are_lost(tmp_path: Path) -> None:
    store = store_of(tiny_model("llama"), directory=tmp_path / "store")
    chat = store.open("a")
    chat.generate(**ones(some_ids(8)), **GREEDY)
    store.flush()
    shutil.rmtree(tmp_path / "store")
    chat.rewind(tokens=1)
    assert "removed, or replaced" in store.stats.problem
    with pytest.warns(RuntimeWarning, match="is lost with this store: 'a'. .* was removed, or replaced"):
        store.close()
    assert not (tmp_path / "store").exists()


def test_what_is_not_saved_of_a_conversation_does_not_rank_what_is(tmp_path: Path) -> None:
    """Its row says what it was, and so does the rank there: nobody could unpin what no conversation says is pinned."""
    model = tiny_model("llama")
    store = store_of(model, directory=tmp_path)
    chat = store.open("a")
    chat.generate(**ones(some_ids(8)), **GREEDY)
    chat.messages.append({"role": "user", "at": object()})  # of no type that JSON has
    chat.pinned = True
    store.flush()
    with pytest.warns(RuntimeWarning, match="is lost with this store: 'a'. "):
        store.close()
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        assert store._disk_tier.disk._order.pinned == []
        assert not store.open("a").pinned


@pytest.mark.parametrize("before", [False, True], ids=["now", "before"])
def test_what_is_saved_ends_at_a_copy_of_states_or_is_computed(before: bool, tmp_path: Path) -> None:
    """A pinned conversation has the budget of all copies, so that what goes on with it keeps none of its own. A folder
    may have files without states from `before` that was heeded."""
    model, ids = tiny_model("qwen3_next"), some_ids(40)
    with store_of(model) as store:
        store.open("a").generate(**ones(ids), **GREEDY)
        [entry] = store.kept.entries.values()
        one = store.kept.state_bytes // len(entry.states)
    with store_of(model, directory=tmp_path, state_budget=one) as store:
        history = store.open("a", pinned=True).generate(**ones(ids), **GREEDY)
        store.flush()
        tier = store.disk_tier
        assert tier is not None
        for chunk in list(tier.disk._chunks):  # for others needed the room
            tier.disk.forget(chunk)
        longer = grown(history)
        store.generate(**ones(longer), **GREEDY)
        [entry] = store.kept.entries.values()
        assert max(entry.states) < entry.sequence.length
        store.flush()
        if before:
            for chunk in list(tier.disk._chunks):
                tier.disk.forget(chunk)
            name = disk_tier._key(entry.key)
            assert name is not None
            tier._archive.save(Saved(name, entry.ids, None, entry.key))
            assert len(tier.disk._chunks) > 0
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(longer), **GREEDY), fresh(model, ones(longer)))
        assert store.reuse[0].loaded == (0 if before else history.shape[1] - 1)
        assert store.reuse[0].why == ("what is saved cannot be read" if before else "")
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(longer), **GREEDY), fresh(model, ones(longer)))
        assert store.reuse[0].loaded == history.shape[1] - 1, "no states are saved behind a file without"
