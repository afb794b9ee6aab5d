"""Programs in processes that are forked for them begin and end as those of `python -c` do."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import forks
import pytest


def test_a_program_has_its_arguments_variables_and_folder_and_nothing_of_the_tests(tmp_path: Path) -> None:
    code = "import os, sys; print(__name__, sys.argv, os.getcwd(), dict(os.environ), *sys.modules, sep='\\n')"
    done = forks.run(code, "a", "b", env={"SOME": "thing"}, cwd=tmp_path)
    *found, variables = done.stdout.splitlines()[:4]
    assert found == ["__main__", "['-c', 'a', 'b']", str(tmp_path)]
    assert variables == "{'SOME': 'thing'}"
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[4:]}
    assert "torch" in loaded
    assert not loaded & {"kvtier", "pytest", "forks"}


LAST = """
import atexit, threading, time
atexit.register(print, "end")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""


@pytest.mark.parametrize(
    ("code", "status", "said", "told"),
    [
        ("print('some', flush=True); import sys; sys.exit(3)", 3, "some\n", ""),
        ("import sys; sys.exit('no')", 1, "", "no\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, "", ""),
        (LAST, 0, "thread\nend\n", ""),
    ],
    ids=["exit", "sentence", "error", "signal", "last"],
)
def test_a_program_ends_as_in_a_python_of_its_own(code: str, status: int, said: str, told: str) -> None:
    done = forks.run(code)
    assert (done.returncode, done.stdout) == (status, said)
    assert done.stderr.endswith(told)


def test_a_program_whose_time_is_up_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run("import time; time.sleep(60)", timeout=0.1)


def test_a_signal_to_a_program_that_has_ended_is_nothing() -> None:
    program = forks.Fork("import time; time.sleep(60)")
    for _ in range(20):  # the first one ends it, and somebody else waits for it
        program.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    assert program.wait() == -signal.SIGKILL
    program.close()
