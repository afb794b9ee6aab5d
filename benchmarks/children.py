"""Processes that measure or test: each has a time limit, and none outlives the run, but one that cannot be killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.records import ROOT


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` is None if it ran past its limit. `tail` is the end of what it printed, if kept."""

    code: int | None
    tail: str


class Children:
    """The processes of this run. Each is the head of a group of its own, and all end when the `with` block does,
    but one that is in the midst of a call of a driver that hangs."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        for child in list(self._running):
            end_group(child)

    def run(
        self, command: Sequence[str], seconds: float, *, keep: bool, notice: float = 0.0, **environment: str
    ) -> Ended:
        """Run a command to its end, for at most `seconds`; `notice` seconds before that it is interrupted, so that it
        may say where it is."""
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | environment,
            stdout=subprocess.PIPE if keep else None,
            stderr=subprocess.STDOUT if keep else None,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._running.add(child)
        if self._closed:  # by another thread, meanwhile
            end_group(child)
        try:
            output, _ = child.communicate(timeout=max(seconds - notice, 1.0))
            return Ended(child.returncode, output or "")
        except subprocess.TimeoutExpired:
            if notice:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, signal.SIGINT)
                    output, _ = child.communicate(timeout=notice)
                    return Ended(None, output or "")
            # Its head may have ended, and what that began keeps the pipe open.
            end_group(child, whole=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = child.communicate(timeout=10)
                return Ended(None, output or "")
            return Ended(None, "")
        finally:
            end_group(child)
            self._running.discard(child)


#: Seconds that a killed process gets to end: one in the midst of a call of a driver that hangs never does.
KILLED = 5.0
#: Linux only. Looked up here: between fork and exec as little as possible is done.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process when its parent is killed, which then cannot: none may stay on the device.

    What this process begins in turn does not hear of it. An interrupt is heard, though who runs the parent in the
    background has it ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(child: subprocess.Popen[str], *, whole: bool = False) -> None:
    """End a child and its group; `whole`: the group is known to live, whether its head does or not."""
    if whole or child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED)
