"""Programs in processes of their own that have torch and Transformers from the beginning.

A Python that imports both takes seconds of CPU. One does, the first time that somebody asks, and forks for every
program: that begins with neither kvtier nor anything of the tests. What is about the import of torch, about variables
that torch reads then, or about modules that are taken apart as Python ends, needs a Python of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

#: Bytes of a request: code, arguments, variables.
LARGEST = 2**18


class Fork:
    """A program that runs, much like `subprocess.Popen`.

    Args:
        code: of the program.
        args: `sys.argv` behind the first.
        env: its variables; by default those of this process.
        cwd: its folder; by default that of this process.

    Attributes:
        pid: of its process.
        stdout, stderr: what it prints; read only once one of them is closed by its end, if it prints much on both.
        returncode: None until `wait` has returned.
    """

    def __init__(self, code: str, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        asked = {
            "code": code,
            "args": args,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        ends = [os.pipe() for _ in range(3)]
        data = json.dumps(asked).encode()
        assert len(data) < LARGEST
        socket.send_fds(_server(), [data], [write for _, write in ends])
        for _, write in ends:
            os.close(write)
        self.stdout, self.stderr, self._told = (open(read) for read, _ in ends)  # noqa: SIM115
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float = 120) -> int:
        """Until it ends."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a program", timeout)
            self.returncode = int(self._told.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As long as it runs. It may have ended, and been waited for by the process that began it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it prints, until it ends; killed when its time is up."""
        by = time.monotonic() + timeout
        said = {self.stdout: b"", self.stderr: b""}
        with selectors.DefaultSelector() as ready:
            for file in said:
                ready.register(file, selectors.EVENT_READ)
            while ready.get_map():
                left = by - time.monotonic()
                if left <= 0:
                    self.send_signal(signal.SIGKILL)
                    raise subprocess.TimeoutExpired("a program", timeout)
                for key, _ in ready.select(left):
                    some = os.read(key.fd, 2**16)
                    said[key.fileobj] += some  # type: ignore[index]
                    if not some:
                        ready.unregister(key.fileobj)
        self.wait()
        self.close()
        return said[self.stdout].decode(), said[self.stderr].decode()

    def close(self) -> None:
        """Close its pipes."""
        for file in (self.stdout, self.stderr, self._told):
            file.close()


def run(
    code: str, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run` does with `python -c`."""
    program = Fork(code, *args, env=env, cwd=cwd)
    stdout, stderr = program.communicate(timeout)
    return subprocess.CompletedProcess(args, program.wait(), stdout, stderr)


@functools.cache
def _server() -> socket.socket:
    """To the process that forks, which ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, __file__, str(there.fileno())]
    subprocess.Popen(command, pass_fds=[there.fileno()], env=env, stdin=subprocess.DEVNULL)
    there.close()
    atexit.register(here.close)
    return here


def _serve(asked: socket.socket) -> dict:
    """Fork for every request until nobody can ask any more. Returns in the forked processes: their program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, ends, *_ = socket.recv_fds(asked, LARGEST, 3)
        if not data:
            os._exit(0)
        if not os.fork():  # a process that waits for the program's, and says how it ended
            break
        for end in ends:
            os.close(end)
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        os.write(ends[2], b"%d\n" % child)
        for end in ends[:2]:
            os.close(end)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(ends[2], b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for number in (1, 2):
        os.dup2(ends[number - 1], number)
    for end in ends:
        os.close(end)
    return json.loads(data)


def _become(program: dict) -> tuple[types.CodeType, dict]:
    """Be as a Python that was started for this. What it runs, and where."""
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["env"])
    time.tzset()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = ["", *paths]
    sys.argv = ["-c", *program["args"]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    return compile(program["code"], "<string>", "exec"), vars(main)


def _end(program: types.CodeType, names: dict) -> None:
    """Run it and end: threads and what is registered for the end come first, as in any Python."""
    status = 0
    try:
        exec(program, names)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take apart what torch and Transformers are would take a second


if __name__ == "__main__":
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.collect()
    gc.freeze()
    _end(*_become(_serve(socket.socket(fileno=int(sys.argv[1])))))
