"""`kvtier store`: what a directory holds is told without its model, and what is wrong is a sentence."""

from __future__ import annotations

import io
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier.cli.main import main
from kvtier.cli.store import plain
from kvtier.config import format_size
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.keys import key_of
from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.disk.tools.contents import contents
from kvtier.conversation.index import packed

Run = Callable[..., tuple[int, str, str]]
KEY = "((None,), None)"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> tuple[int, str, str]:
        status = main(["store", *map(str, args)])
        return status, *capsys.readouterr()

    return call


def saved(folder: Path, **histories: list[int]) -> None:
    """A folder with conversations, of which each turn is two tokens; "loose": of none."""
    disk = Disk(folder, None, {"model": "SomeModel", "config": "c", "weights": "w"})
    for name, ids in histories.items():
        for stop in range(2, len(ids) + 1, 2):
            start, parent = disk.find(KEY, packed(ids[:stop]))
            if start < stop:
                part = torch.zeros(1, stop - start, 8)
                disk.write(KEY, packed(ids[:stop]), start, parent, {"k.0": part, "v.0": -part}, "")
        messages = [{"role": "user", "content": f"\x1b[2Jhello {name}"}, {"role": "assistant", "content": "yes"}]
        if name != "loose":
            disk.save_conversation(name, {"ids": ids, "messages": messages, "salt": None})
    disk.close()


def test_conversations_are_listed_with_what_they_share(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2, 3, 4], bob=[1, 2, 5, 6], loose=[7, 8])
    status, out, _ = run("ls", tmp_path)
    assert status == 0
    head, alice, bob, _, total, by = out.splitlines()
    assert by.startswith("computed by an unknown version: ")
    assert head.split() == ["name", "turns", "tokens", "bytes", "shared"]
    assert (alice.split()[:3], bob.split()[:3]) == (["alice", "1", "4"], ["bob", "1", "4"])
    assert total.startswith("2 conversations of SomeModel, ")
    found = json.loads(run("ls", tmp_path, "--json")[1])
    each = next(tmp_path.glob("*.safetensors")).stat().st_size
    assert [(x["bytes"], x["shared_bytes"]) for x in found["conversations"]] == [(2 * each, each)] * 2
    assert (found["files"], found["bytes"], found["unreferred_bytes"]) == (4, 4 * each, each)
    assert found["model"]["model"] == "SomeModel"


def test_a_conversation_is_shown_with_its_files(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2, 3, 4], bob=[1, 2, 5, 6])
    status, out, _ = run("show", tmp_path, "alice")
    assert status == 0
    assert "user: \\x1b[2Jhello alice" in out
    assert "assistant: yes" in out
    assert "in 2 conversations" in out
    found = json.loads(run("show", tmp_path, "alice", "--json")[1])
    assert [(x["start"], x["stop"], x["continues"], x["conversations"]) for x in found["files"]] == [
        (0, 2, None, 2),
        (2, 4, 1, 1),
    ]


def test_damage_is_listed_with_status_1_and_forgotten_on_request(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2, 3, 4, 5, 6], bob=[7, 8])
    assert run("verify", tmp_path) == (0, run("verify", tmp_path)[1], "")
    bad = random.Random(0).choice(sorted(tmp_path.glob("*.safetensors")))
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    status, out, _ = run("verify", tmp_path)
    assert status == 1
    assert out.startswith(f"{bad.name.removesuffix('.safetensors')}: ")
    assert "1 damaged" in out
    assert sorted(tmp_path.iterdir()) == before, "reading removes nothing"
    assert run("verify", tmp_path, "--repair")[0] == 1
    assert run("verify", tmp_path)[0] == 0
    assert not bad.exists()


def test_what_nobody_refers_to_is_counted_and_then_removed(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2, 3, 4], loose=[7, 8, 9, 1])
    _, told, _ = run("gc", tmp_path, "--dry-run")
    assert len(contents(tmp_path).rows) == 4
    status, done, _ = run("gc", tmp_path)
    assert status == 0
    assert done == told.replace("would be removed", "removed")
    assert "2 files" in done
    assert len(contents(tmp_path).rows) == 2
    assert "0 files removed" in run("gc", tmp_path)[1]


def test_what_another_version_has_computed_is_listed_and_removed_by_its_name(run: Run, tmp_path: Path) -> None:
    disk = Disk(tmp_path, None, {"model": "SomeModel", "config": "c", "weights": "w"})
    for version in ("5.17.0", "5.24.0"):
        key, parent = key_of(f"transformers {version}", (None,), "salt"), None
        for start in (0, 2):
            part = {"k.0": torch.zeros(1, 2, 8), "v.0": torch.zeros(1, 2, 8)}
            parent = disk.write(key, packed([1, 2, 3, 4][: start + 2]), start, parent, part, "")
    disk.save_conversation("alice", {"ids": [1, 2, 3, 4], "messages": [], "salt": "salt"})
    disk.close()
    each = next(tmp_path.glob("*.safetensors")).stat().st_size
    assert f"computed by transformers 5.17.0: {format_size(2 * each)} in 2 files" in run("ls", tmp_path)[1]
    by = json.loads(run("ls", tmp_path, "--json")[1])["computed_by"]
    assert by == {"transformers 5.17.0": 2 * each, "transformers 5.24.0": 2 * each}
    assert "0 files removed" in run("gc", tmp_path)[1], "a conversation refers to both"
    for options in ((), ("--dry-run",)):
        status, _, error = run("drop", tmp_path, "5.20.0", *options)
        assert status == 2
        assert "computed by 'transformers 5.20.0', but by transformers 5.17.0, transformers 5.24.0" in error
    _, told, _ = run("drop", tmp_path, "5.17.0", "--dry-run")
    assert len(contents(tmp_path).rows) == 4
    status, done, _ = run("drop", tmp_path, "5.17.0")
    assert (status, done) == (0, told.replace("would be removed", "removed"))
    assert "transformers 5.17.0: 2 files removed" in done
    found = contents(tmp_path)
    assert found.computed_by() == {"transformers 5.24.0": [3, 4]}
    assert list(found.conversations) == ["alice"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert run("verify", tmp_path)[0] == 0


def test_files_are_merged(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2, 3, 4, 5, 6])
    status, out, _ = run("compact", tmp_path)
    assert status == 0
    assert out.startswith("3 of 3 files merged; ")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_what_was_merged_is_said_also_where_the_database_cannot_shrink(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Manifest) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    saved(tmp_path, alice=[1, 2, 3, 4, 5, 6])
    monkeypatch.setattr(Manifest, "vacuum", full)
    status, out, error = run("compact", tmp_path)
    assert status == 1
    assert out.startswith("3 of 3 files merged; ")
    assert error == "kvtier: database or disk is full: the database has not given back what it does not use.\n"


def test_a_conversation_is_removed_after_a_question(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    saved(tmp_path, alice=[1, 2], bob=[3, 4])
    assert run("rm", tmp_path, "carol", "--yes")[0] == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "--yes" in run("rm", tmp_path, "alice")[2]
    for typed, status in (("\n", 1), ("n\n", 1), ("", 1), ("y\n", 0)):
        assert "alice" in contents(tmp_path).conversations
        monkeypatch.setattr(sys, "stdin", Typed(typed))
        assert run("rm", tmp_path, "alice")[0] == status
    assert set(contents(tmp_path).conversations) == {"bob"}
    assert len(contents(tmp_path).rows) == 2
    assert run("rm", tmp_path, "bob", "--yes", "--gc")[0] == 0
    assert not contents(tmp_path).rows


@pytest.mark.parametrize("verb", ["ls", "verify", "compact", "gc", "show", "rm"])
def test_a_wrong_directory_is_a_sentence_and_makes_nothing(verb: str, run: Run, tmp_path: Path) -> None:
    name = ["x"] if verb in ("show", "rm") else []
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "manifest.sqlite").write_text("nothing of ours, and long enough to be a page" * 100)
    for where in ("nowhere", "file", "other", "none"):
        status, out, err = run(verb, tmp_path / where, *name)
        assert (status, out) == (2, "")
        assert err.startswith("kvtier: ")
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "nowhere").exists()
    assert not list((tmp_path / "other").iterdir())


def test_a_directory_that_is_open_is_read_and_not_changed(run: Run, tmp_path: Path) -> None:
    saved(tmp_path, alice=[1, 2])
    disk = Disk(tmp_path, None, {"model": "SomeModel", "config": "c", "weights": "w"})
    try:
        for args in (["ls"], ["verify"], ["gc", "--dry-run"]):
            assert run(args[0], tmp_path, *args[1:])[0] == 0
        for args in (["compact"], ["gc"], ["rm", "alice", "--yes"]):
            status, _, err = run(args[0], tmp_path, *args[1:])
            assert status == 2
            assert "is open in another store or process" in err
    finally:
        disk.close()


def test_text_of_others_cannot_move_the_cursor() -> None:
    assert plain("a\x1b[2J\r\n\u202eé\udc80 ") == "a\\x1b[2J\\r\\n\\u202eé\\udc80 "
    assert plain("a\tb\nc\x07", lines=True) == "a\tb\nc\\x07"
