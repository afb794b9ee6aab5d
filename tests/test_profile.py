"""The profile: what was stored is found by every process, nothing else is, and reading it raises no errors."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvtier import profile
from kvtier.errors import ConfigError


def number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_a_stored_value_is_found_until_another_is_stored() -> None:
    assert profile.lookup("m", "a", number) is None
    for value in (5, 7):
        path = profile.store("m", "a", value)
        assert path == profile.file_of("m")
        assert profile.lookup("m", "a", number) == value


def test_what_was_stored_last_is_last_in_the_file() -> None:
    for name in "bacb":
        path = profile.store("m", name, 1)
    assert list(json.loads(path.read_text())["values"]) == ["a", "c", "b"]
    assert profile.names("m") == ["a", "b", "c"]


def test_looking_a_value_up_creates_nothing(folder: Path) -> None:
    profile.lookup("m", "a", number)
    assert not folder.exists()


def test_whoever_reads_other_files_of_a_user_reads_the_profile(folder: Path) -> None:
    other = folder.parent / "other"
    other.touch()
    path = profile.store("machine", "name", 1)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    assert [x.name for x in path.parent.iterdir()] == [path.name], "something is left of how it was written"


def test_names_and_machines_are_kept_apart(folder: Path) -> None:
    places = [(m, n) for m in ("m", "o") for n in ("a", "b")]
    for value, place in enumerate(places, 1):
        profile.store(*place, value)
    assert [profile.lookup(*place, number) for place in places] == [1, 2, 3, 4]
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\x00",
        "[" * 100_000,
        '{"machine": "m", "values": 3}',
        '{"machine": "m", "values": {"a": "x"}}',
        '{"machine": "m", "values": {"a": true}}',
        '{"machine": "m", "values": {"a": -1}}',
        '{"machine": "other", "values": {"a": 7}}',
    ],
)
def test_a_damaged_file_has_no_values_and_storing_replaces_it(content: str) -> None:
    path = profile.file_of("m")
    path.parent.mkdir()
    path.write_text(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert profile.lookup("m", "a", number) is None
    if '"values": {' not in content or "other" in content:  # a single value may be an older version's
        assert "is not used" in str(told[0].message)
        assert str(path) in str(told[0].message)
    profile.store("m", "a", 5)
    assert json.loads(path.read_text()) == {"machine": "m", "values": {"a": 5}}


STORES = """
import sys
from kvtier import profile
print(flush=True)
sys.stdin.readline()
for i in range(100):
    profile.store("m", f"{sys.argv[1]} {i}", i)
"""


def test_processes_that_store_at_once_lose_nothing(folder: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", STORES, name], **pipes) for name in "ab"]  # type: ignore[call-overload]
    for x in running:
        x.stdout.readline()  # it is there, and waits
    for x in running:
        x.stdin.write(b"\n")
        x.stdin.flush()
    assert [x.communicate(timeout=120)[0] for x in running] == [b"", b""]
    assert len(profile.names("m")) == 200
    assert [x.name for x in folder.iterdir()] == [profile.file_of("m").name]


def test_a_process_that_is_forked_while_one_is_stored_does_not_keep_the_folder(folder: Path) -> None:
    folder.mkdir()
    with profile._alone(folder):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")  # a file where the folder should be
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "file"))
    assert profile.lookup("m", "a", number) is None
    with pytest.raises(ConfigError, match=r"cannot be written.*KVTIER_PROFILE"):
        profile.store("m", "a", 1)


@pytest.mark.parametrize("what", ["replace", "open", "write"])
def test_a_write_that_fails_leaves_the_file_as_it_was_and_no_other(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile.store("m", "a", 5)
    before = profile.file_of("m").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    def half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        full()

    with monkeypatch.context() as patch:
        if what == "replace":
            patch.setattr(os, "replace", full)
        else:
            patch.setattr(Path, "write_text", full if what == "open" else half)
        with pytest.raises(ConfigError, match="no space"):
            profile.store("m", "b", 6)
    assert [x.read_bytes() for x in folder.iterdir()] == [before]


@pytest.mark.parametrize("setting", ["OFF", "0", "none", "here", "./here"])
def test_a_setting_that_is_neither_off_nor_a_path_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profile.VARIABLE, setting)
    for call in (profile.enabled, lambda: profile.lookup("m", "a", number), lambda: profile.store("m", "a", 4)):
        with pytest.raises(ConfigError, match="absolute path"):
            call()


def test_off_reads_nothing_and_refuses_to_store(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    profile.store("m", "a", 4)
    assert profile.enabled()
    monkeypatch.setenv(profile.VARIABLE, "off")
    assert not profile.enabled()
    assert profile.lookup("m", "a", number) is None
    with pytest.raises(ConfigError, match="KVTIER_PROFILE=off"):
        profile.store("m", "a", 5)
    monkeypatch.setenv(profile.VARIABLE, str(folder))
    assert profile.lookup("m", "a", number) == 4


def test_without_a_setting_the_folder_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profile.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert profile.file_of("m").parent == Path("/somewhere/kvtier")
    monkeypatch.setenv("HOME", "/home/of")
    for none in ("", "here", "./here"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert profile.file_of("m").parent == Path("/home/of/.cache/kvtier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile.file_of("m").parent == Path("/home/of/.cache/kvtier")


def test_without_a_home_folder_nothing_is_found_and_storing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(profile.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert profile.lookup("m", "a", number) is None
    with pytest.raises(ConfigError, match="no home folder"):
        profile.store("m", "a", 1)
