"""What was measured once is remembered: in a process, on disk, and never at the price of an error."""

from __future__ import annotations

import io
import json
import os
import warnings
from pathlib import Path

import pytest

from kvtier import measured
from kvtier.errors import ConfigError


class Meter:
    """Gives another value at each measurement, and counts them."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self) -> int:
        self.taken += 1
        return self.taken


def number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(measured, "_known", {})
    return tmp_path / "kept"


def test_a_value_is_measured_once_and_every_later_process_reads_it() -> None:
    meter = Meter()
    assert [measured.remembered("m", "a", number, meter) for _ in range(3)] == [1, 1, 1]
    measured.forget()  # as another process would begin
    assert measured.remembered("m", "a", number, meter) == 1
    assert meter.taken == 1


def test_names_and_machines_are_kept_apart() -> None:
    meter = Meter()
    found = [measured.remembered(m, n, number, meter) for m in ("m", "o") for n in ("a", "b")]
    assert found == [1, 2, 3, 4]
    measured.forget()
    assert [measured.remembered(m, n, number, meter) for m in ("m", "o") for n in ("a", "b")] == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00",
        '{"machine": "m", "values": 3}',
        '{"machine": "m", "values": {"a": "x"}}',
        '{"machine": "m", "values": {"a": true}}',
        '{"machine": "m", "values": {"a": -1}}',
        '{"machine": "other", "values": {"a": 7}}',
    ],
)
def test_a_damaged_or_foreign_file_is_as_none_and_is_mended(text: str) -> None:
    path = measured.file_of("m")
    path.parent.mkdir()
    path.write_text(text)
    assert measured.remembered("m", "a", number, lambda: 5) == 5
    assert json.loads(path.read_text()) == {"machine": "m", "values": {"a": 5}}


def test_a_folder_that_cannot_be_written_costs_only_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a file where the folder should be
    meter = Meter()
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="nothing can be kept there"):
        assert measured.remembered("m", "a", number, meter) == 1
    assert measured.remembered("m", "a", number, meter) == 1
    # Of the usual folder, which nobody asked for, nothing is said.
    monkeypatch.delenv(measured.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured.remembered("m", "b", number, meter) == 2


@pytest.mark.parametrize("what", ["replace", "fdopen", "write"])
def test_a_write_that_fails_leaves_the_file_and_nothing_beside_it(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.remembered("m", "a", number, lambda: 5)
    before = measured.file_of("m").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("no space")

    class Full(io.StringIO):
        write = full  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        if what == "write":
            patch.setattr(os, "fdopen", lambda *_, **__: Full())
        else:
            patch.setattr(os, what, full)
        with pytest.warns(RuntimeWarning, match="no space"):
            assert measured.remembered("m", "b", number, lambda: 6) == 6
    assert [x.read_bytes() for x in folder.iterdir()] == [before]


@pytest.mark.parametrize("setting", ["OFF", "0", "none", "here", "./here"])
def test_a_setting_that_is_neither_off_nor_a_path_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measured.VARIABLE, setting)
    for ask in (measured.wanted, lambda: measured.remembered("m", "a", number, lambda: 4)):
        with pytest.raises(ConfigError, match="absolute path"):
            ask()


def test_a_measurement_that_fails_is_not_remembered() -> None:
    def broken() -> int:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        measured.remembered("m", "a", number, broken)
    assert not measured.file_of("m").exists()
    assert measured.remembered("m", "a", number, lambda: 4) == 4


def test_off_reads_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.wanted()
    monkeypatch.setenv(measured.VARIABLE, "off")
    assert not measured.wanted()
    with pytest.raises(ConfigError, match="KVTIER_MEASURED"):
        measured.remembered("m", "a", number, lambda: 4)


def test_without_a_folder_of_its_own_it_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(measured.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert measured.file_of("m").parent == Path("/somewhere/kvtier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/of")
    assert measured.file_of("m").parent == Path("/home/of/.cache/kvtier")
