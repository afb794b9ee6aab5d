"""Lists of conversations in pieces: what is saved, read and left of them, and what a save takes."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import disk_of, states_of

from kvtier.conversation.disk.files.folder import MANIFEST
from kvtier.conversation.disk.rows import conversations, pieces
from kvtier.conversation.disk.rows.manifest import VERSION
from kvtier.conversation.disk.rows.pieces import Written
from kvtier.conversation.disk.tools.contents import contents

WALKS = max(2, int(os.environ.get("KVTIER_TEST_TURNS", "96")) // 64)


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_conversation_is_what_was_saved_last_however_it_changed(seed: int, tmp_path: Path) -> None:
    """Lists grow at the end, are cut, and change in the middle; what is saved in pieces is a plain dict's."""
    rng, model, disk = random.Random(seed), dict[str, dict[str, Any]](), disk_of(tmp_path)
    written: dict[
        str, Written
    ] = {}  # what each save is told of those before; now and then nothing, or what is outdated
    for step in range(150):
        name, what = rng.choice("ab"), rng.random()
        state = dict(model.get(name, {"ids": [], "messages": [], "used": 0}))
        ids = list(state["ids"])
        if what < 0.5:
            ids += [rng.randrange(99) for _ in range(rng.choice((0, 1, 5, 300, 9000)))]
        elif what < 0.65:
            del ids[rng.randrange(len(ids) + 1) :]
        elif what < 0.8 and ids:
            ids[rng.randrange(len(ids))] = rng.randrange(99)
        elif what < 0.85:
            del ids[: rng.randrange(len(ids) + 1)]
        elif what < 0.9:
            disk.close()
            disk = disk_of(tmp_path)
            written = {name: Written() for name in "ab"} if rng.random() < 0.5 else written
            for each in rng.choice(("", "a", "ab")):
                assert disk.conversation(each, written.get(each)) == model.get(each)
        elif what < 0.93:
            disk.drop_conversation(name)
            model.pop(name, None)
        elif what < 0.96:
            disk.save_conversation(name, {"ids": [*ids[::2], b"no JSON"]}, written.get(name))
            assert "was not saved" in disk.problem
            disk.problem = ""
        if what < 0.85:
            state |= {"ids": ids, "used": step, "messages": [{"role": "user", "content": str(x)} for x in ids[::50]]}
            if rng.random() < 0.1:
                del state["messages"]
            known = written.setdefault(name, Written()) if rng.random() < 0.8 else None
            disk.save_conversation(name, state, known)
            model[name] = state
        assert states_of(disk) == model
        if rng.random() < 0.2:
            assert contents(tmp_path).conversations == model
    assert (disk.problem, disk.damaged) == ("", 0)
    disk.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_save_serialises_digests_and_reads_what_was_added(
    reopened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is before it: a history has a thousand times as many tokens as a turn."""
    ids, messages = list(range(100_000, 400_000)), [{"role": "user", "content": "x" * 400}] * 1000
    disk, written, read = disk_of(tmp_path), Written(), list[int]()
    disk.save_conversation("a", {"ids": ids, "messages": messages, "used": 0}, written)
    if reopened:
        disk.close()
        disk, written = disk_of(tmp_path), Written()
        assert disk.conversation("a", written) == {"ids": ids, "messages": messages, "used": 0}
    dumps, digest, rows = json.dumps, pieces.digest, pieces._rows

    def counted(work: Any, size: Any) -> Any:
        def does(*args: Any) -> Any:
            found = work(*args)
            read.append(size(args, found))
            return found

        return does

    monkeypatch.setattr(pieces.json, "dumps", counted(dumps, lambda _, text: len(text)))
    monkeypatch.setattr(pieces, "digest", counted(digest, lambda args, _: len(args[1])))
    monkeypatch.setattr(conversations, "digest_of", counted(digest, lambda args, _: len(args[1])))
    monkeypatch.setattr(pieces, "_rows", counted(rows, lambda _, found: sum(len(x[2]) for x in found)))
    for turn in range(1, 20):
        ids = [*ids, *range(128)]
        messages = [*messages, {"role": "user", "content": "y" * 100}]
        disk.save_conversation("a", {"ids": ids, "messages": messages, "used": turn}, written)
        # A list's last piece, which is written again, thrice; and the digests of all.
        assert sum(read) < 400_000, f"turn {turn}"
        read.clear()
    disk.save_conversation("a", {"ids": ids, "messages": messages, "used": turn}, written)
    assert sum(read) < 10_000, "nothing was added"
    monkeypatch.undo()
    assert disk.conversation("a") == {"ids": ids, "messages": messages, "used": 19}
    disk.close()


def test_what_is_changed_in_place_is_saved_though_the_rest_is_known(tmp_path: Path) -> None:
    """Also where Python finds the two equal, and JSON does not."""
    disk, written = disk_of(tmp_path), Written()
    ids, messages = list(range(1000)), [{"role": "tool", "content": "a", "arguments": {"x": 1}} for _ in range(5)]
    state: dict[str, Any] = {"ids": ids, "messages": messages, "ends": [(2, 5)]}

    def saved() -> str:
        disk.save_conversation("a", state, written)
        return json.dumps(disk.conversation("a"))

    assert saved() == json.dumps(state)
    changes: list[Callable[[], object]] = [
        lambda: messages[1].update(content="b"),
        lambda: messages[2]["arguments"].update(x=True),  # type: ignore[attr-defined]
        lambda: messages[2]["arguments"].update(x=1.0),  # type: ignore[attr-defined]
        lambda: ids.__setitem__(7, 8),
        lambda: ids.append(8.0),  # type: ignore[arg-type]
        lambda: ids.__setitem__(-1, 8),
        lambda: ids.pop(),
        lambda: state["ends"].append((4, 9)),
        lambda: ids.clear(),
        lambda: ids.extend([1, 2]),
    ]
    for change in changes:
        change()
        assert saved() == json.dumps(state)
    if reopen := disk.conversation("a", written):
        reopen["messages"][0]["content"] = "what was read is changed"
        disk.save_conversation("a", reopen, written)
        assert disk.conversation("a") == reopen
    assert disk.problem == ""
    disk.close()


def test_a_save_whose_commit_fails_is_not_built_upon(tmp_path: Path) -> None:
    disk, written = disk_of(tmp_path), Written()
    disk.save_conversation("a", {"ids": [1, 2]}, written)
    database = disk._manifest.db
    database.set_progress_handler(lambda: 1, 1)  # whatever is asked, it is interrupted
    disk.save_conversation("a", {"ids": [1, 2, 3]}, written)
    database.set_progress_handler(None, 1)
    assert "interrupted" in disk.problem
    disk.save_conversation("a", {"ids": [1, 2, 3, 4]}, written)
    assert disk.conversation("a") == {"ids": [1, 2, 3, 4]}
    # Of a save that is rolled back, pieces that begin and end where others did.
    disk.save_conversation("a", {"ids": [1, 2, 3, 7], "messages": [b"no JSON"]}, written)
    disk.save_conversation("a", {"ids": [1, 2, 3, 7]}, written)
    assert disk.conversation("a") == {"ids": [1, 2, 3, 7]}
    # Another one that has the name meanwhile, whose pieces do too.
    long = [7] * 60_000
    disk.save_conversation("a", {"ids": long}, written)
    disk.save_conversation("a", {"ids": [8] * 60_000})
    disk.save_conversation("a", {"ids": [*long, 1]}, written)
    assert disk.conversation("a") == {"ids": [*long, 1]}
    # Somebody has removed a piece.
    database.execute("DELETE FROM pieces")
    disk.save_conversation("a", {"ids": [1, 2, 3, 4, 5, 6]}, written)
    assert disk.conversation("a") == {"ids": [1, 2, 3, 4, 5, 6]}
    disk.close()


def test_a_turn_of_a_long_conversation_writes_what_it_adds(tmp_path: Path) -> None:
    """Keys and values of such a turn are megabytes; the rest of the history is not written again."""
    disk, log, known = disk_of(tmp_path), tmp_path / f"{MANIFEST}-wal", Written()
    ids, messages = list(range(100_000, 240_000)), [{"role": "user", "content": "x" * 400}] * 400
    disk.save_conversation("a", {"ids": ids, "messages": messages, "used": 0})
    written = []
    for turn in range(100):
        ids += range(128)
        messages = [*messages, {"role": "user", "content": "y" * 100}]
        with sqlite3.connect(tmp_path / MANIFEST) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        disk.save_conversation("a", {"ids": ids, "messages": messages, "used": turn}, known)
        written.append(log.stat().st_size)
    assert max(written) < 120_000
    assert sum(written) / len(written) < 30_000
    assert disk.conversation("a") == {"ids": ids, "messages": messages, "used": 99}
    rows = disk._manifest.db.execute("SELECT count(*) FROM pieces").fetchone()[0]
    assert rows < 16, "the turns of a long conversation are read in a row each"
    disk.close()


def whole_lists(db: sqlite3.Connection, name: bytes) -> dict[str, str]:
    """A digest of all pieces of each list, as folders of before have it."""
    select = "SELECT field, text FROM pieces WHERE name = ? ORDER BY field, start"
    texts: dict[str, str] = {}
    for field, text in db.execute(select, (name,)):
        texts[field] = texts.get(field, field) + text
    return {field: pieces.digest(name, text).hex() for field, text in texts.items()}


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_that_has_digests_of_whole_lists_too_is_taken_as_it_is(damaged: bool, tmp_path: Path) -> None:
    said = {"ids": [1, 2, 3], "messages": [{"role": "user", "content": "Who?"}], "salt": None}
    disk = disk_of(tmp_path)
    disk.save_conversation("a", said)
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        ((name, text),) = db.execute("SELECT name, state FROM conversations").fetchall()
        text = json.dumps({**json.loads(text), "pieces": whole_lists(db, name)})
        row = text, pieces.digest(name, text)
        db.execute("UPDATE conversations SET state = ?, digest = ?", row)
        db.execute("UPDATE about SET value = '4' WHERE name = 'version'")
        if damaged:
            db.execute("UPDATE pieces SET text = '[1, 2, 4]' WHERE field = 'ids'")
    db.close()
    left = said | {"ids": []} if damaged else said
    assert contents(tmp_path).conversations == ({} if damaged else {"a": said})
    disk, written = disk_of(tmp_path), Written()
    assert disk.conversation("a", written) == left
    assert disk.damaged == damaged
    disk.save_conversation("a", left | {"ids": [1, 2, 3, 4]}, written)
    assert disk.conversation("a") == said | {"ids": [1, 2, 3, 4]}
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        assert db.execute("SELECT value FROM about WHERE name = 'version'").fetchall() == [(f"{VERSION}",)]
        ((text,),) = db.execute("SELECT state FROM conversations").fetchall()
        assert "pieces" not in json.loads(text)
    db.close()


def test_a_folder_of_before_pieces_had_digests_is_taken_as_it_is(tmp_path: Path) -> None:
    said = {"ids": [1, 2, 3], "messages": [{"role": "user", "content": "Who?"}], "salt": None}
    disk = disk_of(tmp_path)
    for name in "ab":
        disk.save_conversation(name, said)
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("DROP TABLE aside")
        for name, text in db.execute("SELECT name, state FROM conversations").fetchall():
            state = json.loads(text)
            state["pieces"] = whole_lists(db, name)
            del state["digests"]
            row = json.dumps(state), pieces.digest(name, json.dumps(state)), name
            db.execute("UPDATE conversations SET state = ?, digest = ? WHERE name = ?", row)
        db.execute("UPDATE pieces SET text = '[1, 2, 4]' WHERE field = 'ids' AND name = CAST('b' AS BLOB)")
    db.close()
    assert contents(tmp_path).conversations == {"a": said}
    disk = disk_of(tmp_path)
    assert (disk.conversation("a"), disk.conversation("b")) == (said, said | {"ids": []})
    disk.save_conversation("a", said | {"ids": [1, 2, 3, 4]})
    assert disk.conversation("a") == said | {"ids": [1, 2, 3, 4]}
    disk.close()
