"""The parser of all commands: what it says without a command, and what it takes to begin."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import kvtier
import kvtier.__main__
from kvtier.cli.arguments import with_flags
from kvtier.cli.main import main


def test_without_a_command_all_of_them_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().err
    assert all(name in listed for name in ("plan", "chat", "serve", "store", "env", "bench", "calibrate", "replay"))


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


def test_the_parser_loads_neither_torch_nor_transformers() -> None:
    # Else Ctrl-C in the first seconds is a traceback, and `--help` takes as long as torch.
    code = "import sys, kvtier.cli.main; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_ctrl_c_before_there_is_a_parser_ends_in_a_line() -> None:
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'kvtier.cli.plan': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from kvtier.__main__ import main\n"
        "print(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("130\n", "kvtier: interrupted\n")


def test_a_warning_of_kvtiers_is_a_sentence_and_one_of_others_says_where_it_is() -> None:
    inside = str(Path(kvtier.__file__).with_name("__main__.py"))
    said = kvtier.__main__._sentence(RuntimeWarning("a budget is large"), RuntimeWarning, inside, 11)
    assert said == "kvtier: a budget is large\n"
    others = (RuntimeWarning("old"), RuntimeWarning, "/elsewhere/torch.py", 7)
    assert kvtier.__main__._sentence(*others) == warnings.formatwarning(*others)
    assert "torch.py:7: RuntimeWarning: old" in kvtier.__main__._sentence(*others)


def test_messages_name_budgets_as_they_are_typed() -> None:
    for said, typed in (
        ("Give host_budget=64 or more, as an option or by `memory.resize`.", "Give --host-budget=64 or more."),
        ("disk_budget is given. (device_budget is small)", "--disk-budget is given. (--device-budget is small)"),
        ("/tmp/host_budget/chats: no such file", "/tmp/host_budget/chats: no such file"),
        ("kvtier:host_budget_bytes, state_budget", "kvtier:host_budget_bytes, state_budget"),
    ):
        assert with_flags(said) == typed
    inside = str(Path(kvtier.__file__).with_name("__main__.py"))
    said = kvtier.__main__._sentence(RuntimeWarning("host_budget is 9 bytes, but"), RuntimeWarning, inside, 1)
    assert said == "kvtier: --host-budget is 9 bytes, but\n"


@pytest.mark.parametrize("command", ["chat", "serve", "calibrate"])
def test_a_model_that_is_loaded_is_a_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_PROFILE", str(tmp_path / "profiles"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, wrong in (("none", "There is no {}: give a folder"), ("config.json", "{} is a file: give a folder")):
        file = str(tmp_path / name)
        assert main([command, file]) == 2
        assert capsys.readouterr().err == f"kvtier: {wrong.format(file)} of a model, or a name on the hub.\n"


def test_a_command_says_its_warnings_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["kvtier"])
    assert kvtier.__main__.main() == 2
    assert warnings.formatwarning is kvtier.__main__._sentence


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second is that of the locale C
def test_what_an_encoding_lacks_is_written_out(errors: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "модель"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64, "vocab_size": 64}))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", errors=errors))
    assert main(["plan", str(folder)]) == 0
    assert "\\u043c\\u043e\\u0434\\u0435\\u043b\\u044c: " in out.getvalue().decode("ascii")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_stream_that_is_a_pipe_by_now_is_printed_to(errors: str, tmp_path: Path) -> None:
    """As of a process that was forked and given pipes: its streams were opened as files."""
    code = (
        "import os, sys\n"
        f"sys.stdout = open({str(tmp_path / 'file')!r}, 'w', encoding='ascii', errors={errors!r})\n"
        "os.dup2(1, sys.stdout.fileno())\n"
        "from kvtier.cli.main import main\n"
        "try:\n    main(['--version'])\nfinally:\n    print('\u00e9', flush=True)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"kvtier {kvtier.__version__}\n\\xe9\n", "")


def test_in_the_locale_c_the_name_of_a_file_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", errors="surrogateescape"))
    assert main([]) == 2
    print("é.png".encode().decode("ascii", "surrogateescape"), flush=True)
    assert out.getvalue() == "é.png\n".encode()


def test_closed_streams_read_nothing_and_what_is_printed_is_not_taken_for_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["bench", "--count", "1"]) == 2
    assert main(["store", "ls", "/nonexistent"]) == 2
    assert not sys.stdin.isatty()
    with pytest.raises(EOFError):
        input()
    print("what is said to nobody", file=sys.stderr, flush=True)
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def ended(redirected: str, *args: str, unbuffered: bool = False) -> tuple[int, str]:
    """The status of a command in a shell, and what it says on stderr."""
    line = f'PYTHONUNBUFFERED={"1" if unbuffered else ""} "$0" -W error -m kvtier "$@" {redirected}'
    ran = subprocess.run(["bash", "-c", line, sys.executable, *args], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stderr


#: Linux has that device.
NO_FULL_DISK = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
#: Commands that print a little, in the parser or when they run.
PRINTS = (["--version"], ["store", "ls", "--help"], ["plan"])


@pytest.fixture(params=PRINTS, ids=" ".join)
def printing(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The arguments of a command that prints."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64, "vocab_size": 64}))
    return [*request.param, str(tmp_path)] if request.param == ["plan"] else request.param


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("redirected", "why"),
    [
        pytest.param(">/dev/full", "No space left on device", marks=NO_FULL_DISK),
        (">&-", "Bad file descriptor"),
    ],
)
def test_a_command_whose_output_is_lost_has_failed(
    redirected: str, why: str, unbuffered: bool, printing: list[str]
) -> None:
    assert ended(redirected, *printing, unbuffered=unbuffered) == (2, f"kvtier: write error: {why}\n")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_command_whose_reader_has_gone_ends_quietly(unbuffered: bool, printing: list[str]) -> None:
    # The reader leaves before the command begins.
    line = f'exec 3> >(exec true); wait $!; PYTHONUNBUFFERED={"1" if unbuffered else ""} "$0" -m kvtier "$@" >&3'
    ran = subprocess.run(["bash", "-c", line, sys.executable, *printing], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (141, "")


@NO_FULL_DISK
def test_a_command_that_is_interrupted_says_only_that_where_its_output_is_lost_too() -> None:
    code = (
        "import sys\n"
        "from kvtier.cli import main\n"
        "def run(argv):\n    print('half of it')\n    raise KeyboardInterrupt\n"
        "main._run = run\n"
        "sys.exit(main.main())"
    )
    line = f"PYTHONUNBUFFERED= '{sys.executable}' -c \"$0\" >/dev/full"
    ran = subprocess.run(["bash", "-c", line, code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (130, "kvtier: interrupted\n")


def test_closed_streams_are_no_warning_as_a_command_ends_that_prints_nothing() -> None:
    line = "<&- >&- 2>&-; echo $? >&3"
    ran = subprocess.run(
        ["bash", "-c", f'exec 3>&1; "$0" -W error -m kvtier {line}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "2\n", "it lists its commands on stderr"


def test_an_error_that_cannot_be_written_is_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["store", "ls", "/nonexistent"]) == 2
