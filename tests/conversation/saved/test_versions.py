"""A folder that is opened under another version of Transformers, whose models may compute other keys and values."""

from __future__ import annotations

import re
import shlex
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from disks import OF, load, save
from families import build_model, tiny_model
from test_store import GREEDY, Tokenizer, fresh, ones, some_ids, store_of

from kvtier import ConfigError, ConversationStore
from kvtier.cli.main import main
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import MANIFEST
from kvtier.conversation.disk.rows.manifest import Row
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank
from kvtier.hf.models.identity import fingerprint

OTHER = "transformers 5.17.0.dev0"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def under(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "COMPUTED_BY", version)


def said(message: str) -> str:
    """A warning that says which versions there are, and that histories stay."""
    return rf"computed by {re.escape(message)}\. This is {re.escape(fingerprint.COMPUTED_BY)}, .* computed again"


def test_what_is_computed_is_of_the_whole_version() -> None:
    assert fingerprint.COMPUTED_BY.split() == ["transformers", transformers.__version__]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_another_version_has_computed_is_computed_again_and_histories_stay(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_model(name), Tokenizer()
    with monkeypatch.context() as patch:
        under(OTHER, patch)
        with store_of(model, directory=tmp_path) as store:
            chat = store.open("alice")
            chat.send("Who are you?", tokenizer=tokenizer, **GREEDY)
            ids, messages = chat.ids, chat.messages
            assert store.stats.problem == ""
    with pytest.warns(RuntimeWarning, match=said(OTHER)):
        store = store_of(model, directory=tmp_path)
    with store:
        assert re.search(said(OTHER), store.stats.problem)
        chat = store.open("alice")
        assert (chat.ids, chat.messages) == (ids, messages)
        prompt = ones(torch.tensor([[*ids, 5]]))
        assert torch.equal(chat.generate(**prompt, **GREEDY), fresh(model, prompt))
        assert store.reuse[0].loaded == 0, "what another version has computed is used"
        assert chat.wake(wait=True).loaded == 0
        store.flush()
    # Each version finds its own from now on.
    with pytest.warns(RuntimeWarning, match=said(OTHER)):
        store = store_of(model, directory=tmp_path)
    with store:
        store.generate(**ones(torch.tensor([[*chat.ids, 5]])), **GREEDY)
        assert store.reuse[0].loaded >= len(ids)
    under(OTHER, monkeypatch)
    here = f"transformers {transformers.__version__}"
    with pytest.warns(RuntimeWarning, match=said(here)):
        store = store_of(model, directory=tmp_path)
    with store:
        store.generate(**ones(torch.tensor([[*ids, 5]])), **GREEDY)
        assert store.reuse[0].loaded >= len(ids) - 1
        assert store.stats.damaged == 0
    # Nothing of it is left when the user drops it, by the command that the warning gives.
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="and stays; once no store has the folder open, `kvtier store drop") as told:
        store = store_of(model, directory=tmp_path)
    before = store.stats.saved_bytes
    store.close()
    command = re.search("`kvtier (store drop .*)`", str(told[0].message))
    assert command is not None
    assert main(shlex.split(command[1])) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = store_of(model, directory=tmp_path)
    with store:
        assert store.stats.saved_bytes < before
        assert store.stats.problem == ""
        assert store.open("alice").messages == messages
        store.generate(**ones(torch.tensor([[*chat.ids, 5]])), **GREEDY)
        assert store.reuse[0].loaded >= len(ids), "this version's own stay"


@pytest.mark.parametrize("said", [True, False])
def test_a_config_that_another_version_writes_otherwise_is_that_of_the_same_model(
    said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = build_model("llama", "sdpa"), ones(some_ids(20))
    with store_of(model, directory=tmp_path) as store:
        store.open("alice").generate(**prompt, **GREEDY)
    if not said:  # a folder of before: it has one config, and does not say which version wrote that
        with sqlite3.connect(tmp_path / MANIFEST) as db:
            db.execute("DELETE FROM about WHERE name LIKE 'config of %'")
        db.close()
        store_of(model, directory=tmp_path).close()
    with monkeypatch.context() as patch:
        under(OTHER, patch)
        model.config.output_router_logits = False  # as 5.24 has it in configs where 5.17 has not
        with pytest.warns(RuntimeWarning, match="computed by"):
            store = store_of(model, directory=tmp_path)
        with store:
            assert len(store.open("alice").ids) == 26
            store.generate(**prompt, **GREEDY)
        model.config.rms_norm_eps *= 2
        with pytest.raises(ConfigError, match="another config"):
            store_of(model, directory=tmp_path)
        model.config.rms_norm_eps /= 2
        with torch.no_grad():
            model.lm_head.weight += 1
        with pytest.raises(ConfigError, match="another weights"):
            store_of(model, directory=tmp_path)
    with pytest.raises(ConfigError, match="another"):
        store_of(model, directory=tmp_path)
    other = build_model("llama", "sdpa")
    with pytest.warns(RuntimeWarning, match="computed by"):
        store = store_of(other, directory=tmp_path)
    with store:
        store.generate(**prompt, **GREEDY)
        assert store.reuse[0].loaded == 19, "each version finds its own"


def test_a_version_that_has_computed_in_an_older_folder_is_held_to_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = build_model("llama", "sdpa"), ones(some_ids(20))
    for version in (None, OTHER):  # both read the same of it
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if version is not None:
                under(version, patch)
            with store_of(model, directory=tmp_path) as store:
                store.generate(**prompt, **GREEDY)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("DELETE FROM about WHERE name LIKE 'config of %'")
    db.close()
    with pytest.warns(RuntimeWarning, match="computed by"):
        store_of(model, directory=tmp_path).close()
    with monkeypatch.context() as patch:
        under(OTHER, patch)
        model.config.rms_norm_eps *= 2
        with pytest.raises(ConfigError, match="another config"):
            store_of(model, directory=tmp_path)


def test_of_a_folder_that_does_not_say_which_version_nothing_is_used(model: Any, tmp_path: Path) -> None:
    ids = some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(ids), **GREEDY)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        select = "SELECT number, key, parent, start, ids, nbytes, checksum FROM chunks"
        for number, key, parent, *rest in db.execute(select).fetchall():
            assert parent is None
            row = Row.of(
                number, key.replace(f"{fingerprint.COMPUTED_BY!r}, ", "", 1).replace("None)", "None,)", 1), None, *rest
            )
            assert row.key == "((None,), None)"
            db.execute("UPDATE chunks SET key = ?, digest = ? WHERE number = ?", (row.key, row.digest, number))
    db.close()
    unknown = said("an unknown version of transformers") + ".* unknown` removes it"
    with pytest.warns(RuntimeWarning, match=unknown):
        store: ConversationStore = store_of(model, directory=tmp_path)
    with store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert (store.reuse[0].loaded, store.stats.damaged) == (0, 0)


def test_a_folder_is_left_to_others_where_the_warning_is_an_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(some_ids(20)), **GREEDY)
    under(OTHER, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="computed by") as held:
            store_of(model, directory=tmp_path)
    monkeypatch.undo()
    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(some_ids(20)), **GREEDY)
        assert store.reuse[0].loaded == 19
    assert held.value, "which keeps alive what was made"


def test_what_others_have_computed_goes_first_where_room_is_needed_pinned_or_not(tmp_path: Path) -> None:
    old, new, more = [1] * 400, [2] * 400, [3] * 400
    disk = Disk(tmp_path, None, OF)
    for ids, key in ((new, "new, None)"), (old, "old, None)")):  # what is used last is the other version's
        assert save(disk, ids, key)
    nbytes = disk.room.nbytes
    disk.close()
    disk = Disk(tmp_path, nbytes + disk.room.rest + 10_000, OF, "new")
    assert disk.others.keys() == {"old, None)"}
    disk.rank("pinned", None, packed(old), Rank(pinned=True), 0.0)
    assert disk.expire() == 0
    assert load(disk, old, "old, None)") == 400, "they stay as long as nobody needs the room"
    assert save(disk, more, "new, None)"), disk.problem
    assert [load(disk, old, "old, None)"), load(disk, new, "new, None)"), load(disk, more, "new, None)")] == [
        0,
        400,
        400,
    ]
    disk.check_integrity()
    disk.close()
