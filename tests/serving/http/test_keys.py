"""Keys of clients: what a file says, and the secret that salts are derived from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier import ConfigError
from kvtier.serving.http.requests.keys import SECRET, Keys, read_keys, secret_of
from kvtier.serving.http.requests.refusals import Refusal

MARK = "\ufeff".encode()


def test_a_byte_order_mark_before_a_comment_makes_it_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(MARK + b"#bob key-old\r\nalice key-a\r\n")
    keys = Keys(read_keys(file), b"x" * 32)
    assert (len(keys), keys.caller("key-a").tenant) == (1, "alice")
    with pytest.raises(Refusal):
        keys.caller("key-old")


def test_a_byte_order_mark_within_a_file_of_keys_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in (b"alice key-a\n" + MARK + b"#bob key-old\n", MARK + b"alice key-a\n# bob" + MARK + b"\n"):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="keys:2: a byte order mark"):
            read_keys(file)


def test_a_line_of_a_file_of_keys_ends_where_editors_end_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice key-a\n# bob was here\u2028bob key-old\n", encoding="utf-8")
    assert len(read_keys(file)) == 1


def test_a_secret_is_on_the_disk_before_its_name_and_its_name_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[tuple[int, bool]](), os.fsync

    def fsync(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, (tmp_path / SECRET).exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    secret = secret_of(tmp_path)
    assert synced == [((tmp_path / SECRET).stat().st_ino, False), (tmp_path.stat().st_ino, True)]
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert secret_of(tmp_path) == secret
    assert [x.name for x in tmp_path.iterdir()] == [SECRET]


def test_no_link_is_followed_to_a_secret(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"o" * 32)
    (tmp_path / SECRET).symlink_to(outside)
    with pytest.raises(ConfigError, match="is a link"):
        secret_of(tmp_path)


def test_no_link_is_followed_from_the_file_that_becomes_a_secret(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"o" * 32)
    for name in ("new", os.getpid()):
        (tmp_path / f"{SECRET}.{name}").symlink_to(outside)
    secret = secret_of(tmp_path)
    assert secret == (tmp_path / SECRET).read_bytes()
    assert not (tmp_path / SECRET).is_symlink()
    assert outside.read_bytes() == b"o" * 32


def test_what_is_no_file_in_place_of_a_secret_holds_up_no_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SECRET)
    with pytest.raises(ConfigError, match="is no file"):
        secret_of(tmp_path)
