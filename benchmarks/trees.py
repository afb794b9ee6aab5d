"""Source trees as contenders: the tiered caches of another commit, measured turn by turn with those of this one.

Two commits of one package cannot be imported into one process. So every contender of such a comparison, this tree's
and DynamicCache too, has a process of its own (`worker`), which does nothing while another one has its turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import end_group, end_with_parent
from benchmarks.contenders import Case
from benchmarks.records import ROOT, commit, source_digest
from benchmarks.turns import TrialEnded

#: Seconds after which a worker that does not answer is ended. It may have to fill a long cache or load a model.
TIME_LIMIT = 600.0
_COMPILED = "kvtier/cpu/*.so"


class TreeError(Exception):
    """A source tree that cannot be measured; the message says why."""


@dataclass(frozen=True)
class Tree:
    """A checkout of this project, with its own native library.

    Attributes:
        path: its folder.
        commit: its commit, with `+` if files of kvtier differ from it; `unknown` outside a repository.
        source: names its code, committed or not.
    """

    path: Path
    commit: str
    source: str

    @classmethod
    def at(cls, path: Path) -> Tree:
        """The tree in a folder.

        Raises:
            TreeError: there is no kvtier, or its native library is not compiled though this tree's is.
        """
        path = path.resolve()
        if not (path / "kvtier" / "__init__.py").is_file():
            raise TreeError("there is no kvtier/__init__.py")
        if any(ROOT.glob(_COMPILED)) and not any(path.glob(_COMPILED)):
            raise TreeError("its native library is not compiled: run `python3 kvtier/cpu/build.py` there")
        return cls(path, commit(path), source_digest(path))

    def __str__(self) -> str:
        return self.commit if self.commit != "unknown" else f"source {self.source}"

    def fields(self) -> dict[str, Any]:
        """For a record, in place of this tree's."""
        return {"commit": self.commit, "source": self.source}


class Process:
    """A worker. Its requests are answered one at a time.

    Args:
        tree: whose kvtier it measures.
        threads: of torch.
        cudnn_attention: whether torch's attention may use cuDNN.
    """

    def __init__(self, tree: Tree, threads: int, *, cudnn_attention: bool) -> None:
        self.tree = tree
        self._trials = itertools.count()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", str(tree.path), str(threads), str(int(cudnn_attention))],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._buffer = b""
        try:
            self.computing = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._child.poll() is None

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            TrialEnded: the worker refused it, failed or is gone.
        """
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do} | fields).encode() + b"\n")
        except (OSError, ValueError) as error:  # it ended, or was ended
            raise self._gone() from error
        found = self._answer()
        if "status" in found:
            raise TrialEnded(found["status"], found["reason"])
        return found

    def trial(self, kind: str, contender: str, tokens: int, case: dict[str, Any]) -> RemoteTrial:
        """Begin a trial of a contender there; the arguments are those of `Worker.open`."""
        number = next(self._trials)
        self.ask("open", trial=number, kind=kind, contender=contender, tokens=tokens, case=case)
        return RemoteTrial(self, number)

    def close(self) -> None:
        """End the process."""
        end_group(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._child.stdout], [], [], TIME_LIMIT)[0]:
                self.close()
                raise TrialEnded("failed", f"the process of {self.tree} did not answer for {TIME_LIMIT:.0f} s")
            read = os.read(self._child.stdout.fileno(), 2**16)
            if not read:
                raise self._gone()
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _gone(self) -> TrialEnded:
        status = self._child.wait()
        return TrialEnded("failed", f"the process of {self.tree} ended with exit status {status}; see its output")


class RemoteTrial:
    """A trial in a worker. A trial that failed to begin is none, and needs no end."""

    def __init__(self, process: Process, number: int) -> None:
        self._process = process
        self._number = number

    def measure(self) -> float:
        """One turn; returns its value."""
        return self._process.ask("measure", trial=self._number)["value"]

    def facts(self) -> dict[str, Any]:
        """What else is worth recording."""
        return self._process.ask("facts", trial=self._number)["facts"]

    def close(self) -> None:
        """Give all memory back."""
        self._process.ask("close", trial=self._number)


def described(model: str, case: Case) -> dict[str, Any]:
    """A case as `Worker.open` takes it."""
    return {
        "model": model,
        "dtype": str(case.geometry.dtype).removeprefix("torch."),
        "device": str(case.device),
        "context": case.context,
        "new_tokens": case.new_tokens,
        "block_size": case.block_size,
        "batch": case.batch,
        "device_block": case.device_block,
    }
