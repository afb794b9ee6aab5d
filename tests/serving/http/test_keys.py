"""Keys of clients: what a file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import ConfigError
from kvtier.serving.http.requests.keys import Keys
from kvtier.serving.http.requests.refusals import Refusal

MARK = "\ufeff".encode()


def test_a_byte_order_mark_before_a_comment_makes_it_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(MARK + b"#bob key-old\r\nalice key-a\r\n")
    keys = Keys.read(file, b"x" * 32)
    assert (len(keys), keys.caller("key-a").tenant) == (1, "alice")
    with pytest.raises(Refusal):
        keys.caller("key-old")


def test_a_byte_order_mark_within_a_file_of_keys_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in (b"alice key-a\n" + MARK + b"#bob key-old\n", MARK + b"alice key-a\n# bob" + MARK + b"\n"):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="keys:2: a byte order mark"):
            Keys.read(file, b"x" * 32)


def test_a_line_of_a_file_of_keys_ends_where_editors_end_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice key-a\n# bob was here\u2028bob key-old\n", encoding="utf-8")
    assert len(Keys.read(file, b"x" * 32)) == 1
