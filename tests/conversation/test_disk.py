"""What is saved is there in the next process, or is not used: whatever happens to the files, tokens are right."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import sqlite3
import textwrap
import time
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from families import build_model, tiny_model
from test_store import GREEDY, Tokenizer, fresh, grown, ones, some_ids, store_of
from test_turns import check_kept

from kvtier import ConfigError, StoreInUseError
from kvtier.conversation.disk import reading as reading_module
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files import files
from kvtier.conversation.disk.rows import pieces
from kvtier.conversation.records import record_of

NAMES = ("llama", "gemma3", "qwen3_next", "deepseek_v3")


def chat(model: Any, directory: Path, turns: int, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Some turns in a store of their own. Returns the prompt of the next turn."""
    with store_of(model, directory=directory, **options) as store:
        for _ in range(turns):
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            ids = grown(out)
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_a_later_store_continues_what_was_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    ids = chat(model, tmp_path, 2, some_ids(40))
    with store_of(model, directory=tmp_path) as store:
        out = store.generate(**ones(ids), **GREEDY)
        assert torch.equal(out, fresh(model, ones(ids)))
        assert store.reuse[0].loaded == store.reuse[0].cached == ids.shape[1] - 5
        check_kept(store, model)
        store.check_integrity()
    assert not [x for x in tmp_path.iterdir() if x.stat().st_mode & 0o077], "readable by others"


def test_a_turn_writes_its_own_tokens_and_what_is_shared_is_there_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        ids = some_ids(200)
        sizes = []
        for _ in range(4):
            ids = grown(store.generate(**ones(ids), **GREEDY))
            store.flush()
            sizes.append(sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")))
        token = 2 * 2 * 12 * 4 * 3
        assert all(b - a < 10 * token * 1.05 + 2000 for a, b in itertools.pairwise(sizes))
        for seed in range(5):
            store.generate(**ones(torch.cat([ids[:, :150], some_ids(3, seed=50 + seed)], 1)), **GREEDY)
        store.flush()
        assert sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")) < sizes[-1] + 5 * (10 * token + 2000)


def test_conversations_are_there_by_name(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model, directory=tmp_path) as store:
        alice = store.open("alice/../..\n\0é", salt="s")
        alice.send("Who are you?", tokenizer=tokenizer, system="Be brief.", **GREEDY)
        alice.fork("bob")
        messages = alice.messages
    with store_of(model, directory=tmp_path) as store:
        assert sorted(store.names) == ["alice/../..\n\0é", "bob"]
        again = store.open("alice/../..\n\0é", salt="s")
        assert again.messages == messages
        again.send("And?", tokenizer=tokenizer, **GREEDY)
        assert again.reuse is not None
        assert again.reuse.loaded == again.reuse.cached > 20
        store.open("bob", salt="s").close()
    with store_of(model, directory=tmp_path) as store:
        assert store.names == ["alice/../..\n\0é"]
    assert sorted(x.suffix for x in tmp_path.iterdir() if x.is_dir()) == []


def test_a_conversation_is_read_when_it_is_opened_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, read, saved = tiny_model("llama"), Tokenizer(), list[str](), list[str]()
    with store_of(model, directory=tmp_path) as store:
        for name in ("alice", "bob", "carol"):
            store.open(name).send(f"I am {name}.", tokenizer=tokenizer, **GREEDY)
        history = store.open("bob").messages
    conversation, save = Disk.conversation, Disk.save_conversation
    monkeypatch.setattr(
        Disk, "conversation", lambda disk, name, *more: (read.append(name), conversation(disk, name, *more))[1]
    )
    monkeypatch.setattr(
        Disk,
        "save_conversation",
        lambda disk, name, state, *more: (saved.append(name), save(disk, name, state, *more)),
    )
    with store_of(model, directory=tmp_path) as store:
        assert store.names == ["alice", "bob", "carol"]
        assert not read
        with pytest.raises(ConfigError, match="already"):
            store.open("bob", new=True)
        assert store.open("bob") is store.open("bob")
        assert store.open("bob").messages == history
        store.forget("carol")
    assert read == ["bob"]
    assert saved == ["bob"], "what was not opened is what it was"
    with store_of(model, directory=tmp_path) as store:
        assert store.names == ["alice", "bob"]
        assert len(store.open("alice").messages) == 2


def test_a_turn_reads_nothing_of_what_was_saved_of_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_model("llama"), Tokenizer()
    for turn in range(2):
        with store_of(model, directory=tmp_path) as store:
            chat = store.open("alice")
            if not turn:
                chat.send("Hello.", tokenizer=tokenizer, **GREEDY)
            with monkeypatch.context() as patch:
                patch.setattr(pieces, "_rows", None)  # whoever reads them fails
                chat.send("And?", tokenizer=tokenizer, **GREEDY)
                store.flush()
            assert store.stats.problem == ""
            messages = chat.messages
    with store_of(model, directory=tmp_path) as store:
        assert store.open("alice").messages == messages


def test_a_conversation_that_cannot_be_read_now_is_an_error_and_stays(tmp_path: Path) -> None:
    """A new one of the same name would be saved in its place."""
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model, directory=tmp_path) as store:
        store.open("alice").send("Hello.", tokenizer=tokenizer, **GREEDY)
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        database = store._disk_tier.disk._manifest.db
        database.set_progress_handler(lambda: 1, 1)  # whatever is asked, it is interrupted
        with pytest.raises(ConfigError, match="cannot be read: interrupted"):
            store.open("alice")
        database.set_progress_handler(None, 1)
        assert len(store.open("alice").messages) == 2


# Refused


def test_what_is_saved_of_a_chat_is_what_it_was_after_some_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, saved = tiny_model("llama"), Tokenizer(), []
    save = Disk.save_conversation
    monkeypatch.setattr(
        Disk,
        "save_conversation",
        lambda disk, name, state, *more: (saved.append(dict(state)), save(disk, name, state, *more)),
    )
    with store_of(model, directory=tmp_path) as store:
        chat, was = store.open("alice"), []
        for message in ("Who are you?", "And?"):
            chat.send(message, tokenizer=tokenizer, **GREEDY)
            was.append(record_of(chat))
        chat.regenerate(tokenizer=tokenizer, **GREEDY)
        was.append(record_of(chat))
        assert saved == was


def test_another_model_is_refused_with_a_message_that_says_what_differs(tmp_path: Path) -> None:
    chat(build_model("llama", "sdpa"), tmp_path, 1, some_ids(40))
    model = build_model("llama", "sdpa")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4].add_(1e-3)
    with pytest.raises(ConfigError, match="another weights"):
        store_of(model, directory=tmp_path)
    with pytest.raises(
        ConfigError, match=r"another dtype: 'float32' there, 'bfloat16' here.* load the model with dtype 'float32'"
    ):
        store_of(build_model("llama", "sdpa").to(torch.bfloat16), directory=tmp_path)
    with pytest.raises(ConfigError, match="another model"):
        store_of(tiny_model("gpt2"), directory=tmp_path)
    store_of(build_model("llama", "sdpa"), directory=tmp_path, block_size=4).close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["saved by", "loaded by"])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_model_whose_weights_are_offloaded_is_the_same_one(
    to: str, offloaded: bool, name: str, tmp_path: Path
) -> None:
    """Between forwards they are on the meta device."""
    model, other = build_model(name, "sdpa"), build_model(name, "sdpa")
    if to == "host":
        cpu_offload(other, execution_device=torch.device("cpu"))
    else:
        disk_offload(other, tmp_path / "weights", execution_device=torch.device("cpu"))
    assert next(other.parameters()).device.type == "meta"
    first, second = (model, other) if offloaded else (other, model)
    with store_of(first, directory=tmp_path / "store") as store:
        chat = store.open("alice")
        chat.send("Who are you?", tokenizer=Tokenizer(), **GREEDY)
        assert store.verify()
        right = fresh(model, ones(grown(torch.tensor([chat.ids]))))
    with store_of(second, directory=tmp_path / "store") as store:
        assert torch.equal(store.generate(**ones(grown(torch.tensor([chat.ids]))), **GREEDY), right)
        assert store.reuse[0].loaded == len(chat.ids) - 1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes here")
def test_a_model_that_one_process_has_sharded_is_the_same_one(tmp_path: Path) -> None:
    """Its weights have no address: to read there would end the process. Those of the outermost module stay gathered
    after a forward, in tensors of their own."""
    program = """
        import sys
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from families import build_model
        from kvtier import ConversationStore
        from kvtier.hf.models.identity.dependence import computed_as
        from kvtier.hf.models.identity.fingerprint import fingerprint

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = build_model("llama", "sdpa")
        whole = fingerprint(model)
        fully_shard(model.model.layers[0])
        assert fingerprint(fully_shard(model)) == whole
        ids = torch.tensor([list(range(3, 23))])
        with ConversationStore(model, directory=sys.argv[1], host_budget="8MiB", block_size=4) as store:
            for cached in (0, 20):
                ids = store.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
                assert (store.reuse[0].cached, store.stats.problem) == (cached, "")
        other = build_model("llama", "sdpa")
        was = computed_as(other)
        assert computed_as(model) == was
        fully_shard(other, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert computed_as(other) != was, "its keys and values are of another dtype"
        dist.destroy_process_group()
    """
    path = os.pathsep.join(str(Path(__file__).parents[up] / name) for up, name in ((2, ""), (1, "hf")))
    run = forks.run(textwrap.dedent(program), str(tmp_path), env=os.environ | {"PYTHONPATH": path})
    assert run.returncode == 0, run.stderr


def test_weights_that_nobody_has_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="meta device"):
        store_of(build_model("llama", "sdpa").to("meta"), directory=tmp_path)


def test_weights_that_change_while_a_folder_is_open_find_and_leave_nothing_there(tmp_path: Path) -> None:
    model = build_model("llama", "sdpa")
    ids = chat(model, tmp_path, 1, some_ids(40))
    weight = model.get_parameter("model.layers.1.self_attn.v_proj.weight")
    before = weight.detach().clone()
    with store_of(model, directory=tmp_path) as store:
        with torch.no_grad():
            weight.mul_(-1)
        for _ in range(2):
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
            assert not store.reuse[0].loaded
        assert "was changed" in store.stats.problem
    with torch.no_grad():
        weight.copy_(before)
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded == ids.shape[1] - 5


def test_a_store_that_nobody_closes_leaves_its_folder_to_others(tmp_path: Path) -> None:
    model = tiny_model("llama")
    store = store_of(model, directory=tmp_path)
    del store
    gc.collect()
    store_of(model, directory=tmp_path).close()


def test_a_folder_has_one_store_at_a_time(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path), pytest.raises(StoreInUseError, match="is open"):
        store_of(model, directory=tmp_path)
    store_of(model, directory=tmp_path).close()


@pytest.mark.parametrize("wrong", ["file", "link", "readonly", "rubbish", "version"])
def test_a_folder_that_is_none_of_ours_is_a_clear_error(wrong: str, tmp_path: Path) -> None:
    model, folder = tiny_model("llama"), tmp_path / "store"
    if wrong == "file":
        folder.write_text("x")
    elif wrong == "link":
        folder.mkdir()
        (folder / "lock").symlink_to(tmp_path / "elsewhere")
    elif wrong == "readonly":
        if os.geteuid() == 0:
            pytest.skip("root writes anywhere")
        folder.mkdir(mode=0o500)
    elif wrong == "rubbish":
        folder.mkdir()
        (folder / "manifest.sqlite").write_bytes(b"rubbish" * 1000)
    else:
        store_of(model, directory=folder).close()
        db = sqlite3.connect(folder / "manifest.sqlite")
        db.execute("UPDATE about SET value = '99' WHERE name = 'version'")
        db.commit()
        db.close()
    with pytest.raises(ConfigError):
        store_of(model, directory=folder)
    assert not (tmp_path / "elsewhere").exists()


def test_a_budget_without_a_folder_and_shares_are_refused(tmp_path: Path) -> None:
    for options in ({"disk_budget": "1GiB"}, {"disk_budget": 0.5, "directory": tmp_path}):
        with pytest.raises(ConfigError):
            store_of(tiny_model("llama"), **options)


# Room


def test_the_disk_budget_holds_and_the_longest_unused_goes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path, disk_budget=200_000) as store:
        for seed in range(12):
            store.generate(**ones(some_ids(60, seed=seed)), **GREEDY)
            store.flush()
            assert sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")) <= 200_000
            assert store.stats.saved_bytes <= 200_000
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(some_ids(60, seed=11)), **GREEDY)
        assert store.reuse[0].loaded == 59
        store.generate(**ones(some_ids(60, seed=0)), **GREEDY)
        assert store.reuse[0].loaded == 0


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_what_the_host_dropped_is_loaded_again(name: str, tmp_path: Path) -> None:
    model, rng = tiny_model(name), random.Random(3)
    with store_of(model, directory=tmp_path, host_budget=60_000) as store:
        chats = [some_ids(30, seed=n) for n in range(5)]
        loaded = 0
        for _ in range(20):
            n = rng.randrange(len(chats))
            out = store.generate(**ones(chats[n]), **GREEDY)
            assert torch.equal(out, fresh(model, ones(chats[n])))
            loaded += store.reuse[0].loaded
            chats[n] = grown(out)[:, :70]
            store.flush()
            store.check_integrity()
        assert loaded


# Damage


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_whatever_byte_is_changed_tokens_are_right(name: str, tmp_path: Path) -> None:
    model, rng = tiny_model(name), random.Random(4)
    source = tmp_path / "whole"
    ids = chat(model, source, 3, some_ids(24))
    right = fresh(model, ones(ids))
    flips = int(os.environ.get("KVTIER_TEST_FLIPS", "30"))
    for n in range(flips):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        damaged = rng.choice([x for x in sorted(folder.iterdir()) if x.stat().st_size])
        data = bytearray(damaged.read_bytes())
        how = rng.random()
        if how < 0.7:
            at = rng.randrange(min(len(data), 2000)) if rng.random() < 0.3 else rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
        elif how < 0.9:
            data = data[: rng.randrange(len(data))]
        damaged.write_bytes(bytes(data))
        if how >= 0.9:
            damaged.unlink()
        try:
            store = store_of(model, directory=folder)
        except ConfigError:
            continue
        with store:
            assert torch.equal(store.generate(**ones(ids), **GREEDY), right)
            store.check_integrity()


@pytest.mark.parametrize("at", range(6))
def test_whichever_call_of_the_disk_fails_nothing_saved_is_lost(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    ids = chat(model, tmp_path, 1, some_ids(40))
    left = [at]

    def failing(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
            return function(*args, **options)

        return call

    with store_of(model, directory=tmp_path) as store, monkeypatch.context() as patch:
        for name in ("open", "write", "fsync", "replace"):
            patch.setattr(files.os, name, failing(getattr(os, name)))
        out = store.generate(**ones(ids), **GREEDY)
        store.flush()
        patch.undo()
        assert torch.equal(out, fresh(model, ones(ids)))
        failed = "No space" in store.stats.problem
        assert not list(tmp_path.glob("*.new"))
    with store_of(model, directory=tmp_path) as store:
        again = grown(out)
        assert torch.equal(store.generate(**ones(again), **GREEDY), fresh(model, ones(again)))
        assert store.reuse[0].loaded >= (45 if failed else 55)


def test_a_process_that_is_killed_leaves_what_was_saved(tmp_path: Path) -> None:
    """Killed at any moment of its turns; the next one goes on with right tokens."""
    here = Path(__file__).resolve().parent
    script = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {[str(x) for x in (here, here / "calls", here.parent / "hf", here.parent.parent)]!r}
        from test_store import *
        model, ids = tiny_model("llama"), some_ids(40)
        with store_of(model, directory=sys.argv[1], disk_budget=400_000) as store:
            print("ready", flush=True)
            while True:
                ids = grown(store.generate(**ones(ids), **GREEDY))[:, :300]
                store.flush()
                print(ids.shape[1], flush=True)
                if ids.shape[1] >= 300: ids = some_ids(40, seed=ids[0, -1].item())
        """
    )
    model, rng = tiny_model("llama"), random.Random(int(os.environ.get("KVTIER_TEST_SEED", "1")))
    for _ in range(int(os.environ.get("KVTIER_TEST_KILLS", "2"))):
        process = forks.Fork(script, str(tmp_path))
        for _ in range(rng.randint(1, 12)):
            assert process.stdout.readline(), process.stderr.read()
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended by itself"
        process.close()
        with store_of(model, directory=tmp_path) as store:
            assert store.stats.damaged == 0
            inputs = ones(some_ids(40))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            check_kept(store, model)
            store.check_integrity()


def test_the_index_on_the_disk_is_what_its_rows_say(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = chat(model, tmp_path, 3, some_ids(40))
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    (number, blob) = db.execute("SELECT number, ids FROM chunks ORDER BY number").fetchone()
    db.execute("UPDATE chunks SET ids = ? WHERE number = ?", (blob[:8] + b"\x07" + blob[9:], number))
    db.commit()
    db.close()
    other = ids.clone()
    other[0, 1] = 7
    with store_of(model, directory=tmp_path) as store:
        for x in (other, ids):
            assert torch.equal(store.generate(**ones(x), **GREEDY), fresh(model, ones(x)))
        assert store.stats.damaged


# Load, or compute again


class SlowClock:
    """`time.perf_counter`, on which every file that is read takes so many seconds longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds, self.late = seconds, 0.0
        clock = time.perf_counter

        def slow(read: Any, *args: Any) -> Any:
            self.late += self.seconds
            return read(*args)

        for name in ("read_tensors", "read_straight"):
            monkeypatch.setattr(reading_module, name, functools.partial(slow, getattr(reading_module, name)))
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + self.late)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_loads_slower_than_it_is_computed_is_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    clock = SlowClock(monkeypatch, 1000.0)
    with store_of(model, directory=tmp_path, loading="auto") as store:
        loaded, following = [], []
        for turn in range(8):
            following.append(ones(grown(store.generate(**ones(some_ids(40 + turn, seed=turn)), **GREEDY))))
            store.flush()
            store.clear()
            assert torch.equal(store.generate(**following[-1], **GREEDY), fresh(model, following[-1]))
            loaded.append(store.reuse[0].loaded > 0)
            store.clear()
        assert loaded == [True] + [False] * 7, "the first time nobody knows"
        clock.seconds = 0.0
        for turn in range(20):
            ids = following[turn % 8]
            assert torch.equal(store.generate(**ids, **GREEDY), fresh(model, ids))
            loaded.append(store.reuse[0].loaded > 0)
            store.flush()
            store.clear()
        assert sum(loaded) > 1, "a disk that became faster is noticed"
    with pytest.raises(ConfigError, match="loading='never'"):
        store_of(model, directory=tmp_path, loading="never")
