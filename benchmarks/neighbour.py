"""A process that takes a core away from those that are measured."""

from __future__ import annotations

import os
import subprocess
import sys

#: Spins on one core until it is killed, or until its parent is gone.
_SPIN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
core, parent = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
print(flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class Neighbour:
    """A process that is busy on one core as long as the `with` block runs."""

    def __init__(self, core: int) -> None:
        self.core = core

    def __enter__(self) -> None:
        arguments = [sys.executable, "-S", "-c", _SPIN, str(self.core), str(os.getpid())]
        self.child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert self.child.stdout is not None
            if not self.child.stdout.readline():
                raise RuntimeError("the busy neighbour did not start")
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self.child.kill()
        self.child.communicate()
