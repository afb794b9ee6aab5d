"""The parser of all commands: what it says without a command, and what it takes to begin."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvtier
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
