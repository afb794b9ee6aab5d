"""What root makes in a folder of another user is that user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_upkeep import check, disk_of, read, save

from kvtier.cli.main import main
from kvtier.conversation.disk.tools.contents import contents
from kvtier.serving.http.requests.keys import secret_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
OTHER = 65534


def give(folder: Path) -> None:
    for each in (folder, *folder.iterdir()):
        os.chown(each, OTHER, OTHER)


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(x.stat().st_uid, x.stat().st_gid) for x in (folder, *folder.iterdir())}


def test_root_merges_files_of_another_user_who_reads_them_then(tmp_path: Path) -> None:
    ids = list[int]()
    with disk_of(tmp_path) as disk:
        for turn in range(4):
            save(disk, ids := [*ids, 1, turn])
        disk.save_conversation("a", {"ids": ids, "messages": [], "salt": None})
    (tmp_path / "lock").unlink()
    give(tmp_path)
    assert main(["store", "compact", str(tmp_path)]) == 0
    assert len(contents(tmp_path).rows) == 1
    assert owners(tmp_path) == {(OTHER, OTHER)}
    check(tmp_path, {"a": ids})


def test_a_store_and_a_server_of_root_make_files_of_the_owner(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3])
    give(tmp_path)
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3, 4])
        secret_of(tmp_path)
        assert owners(tmp_path) == {(OTHER, OTHER)}


def test_a_new_folder_is_of_who_makes_it_whoever_owns_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    with disk_of(folder) as disk:
        save(disk, [1, 2, 3])
        assert {x.stat().st_uid for x in folder.iterdir()} == {0}


def test_a_file_of_others_that_has_the_name_of_an_unfinished_one_is_left_as_it_is(tmp_path: Path) -> None:
    folder, of_others = tmp_path / "store", tmp_path / "file"
    of_others.write_text("of others")
    with disk_of(folder) as disk:
        os.link(of_others, folder / f"{1:012}.safetensors.new")
        save(disk, [1, 2, 3])
        assert read(disk, [1, 2, 3]) == 3
    assert of_others.read_text() == "of others"
