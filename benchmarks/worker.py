"""A child process that measures contenders with the kvtier of one source tree: `python -m benchmarks.worker TREE`.

It reads requests from its standard input and answers each on its standard output, one JSON object a line. The code of
the benchmarks is this tree's in every worker; only kvtier, with its native library, is that of TREE. See `trees`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from benchmarks.turns import Trial


def import_kvtier(tree: Path) -> str:
    """Import the kvtier of a source tree, before anything else does; returns its version.

    Raises:
        ImportError: another kvtier was found.
    """
    # An editable installation would supply modules that the tree does not have.
    sys.meta_path[:] = [x for x in sys.meta_path if not getattr(x, "__module__", "").startswith("__editable__")]
    sys.path.insert(0, str(tree))
    import kvtier

    sys.path.remove(str(tree))  # the benchmarks stay this tree's
    if Path(kvtier.__file__ or "").resolve().parent != tree / "kvtier":
        raise ImportError(f"the kvtier that was imported is not the one of {tree}")
    # A tree without its compiled library would be measured on its slow path.
    warnings.filterwarnings("error", category=RuntimeWarning, module=r"kvtier\.")
    return kvtier.__version__


class Worker:
    """What the process holds between requests."""

    def __init__(self) -> None:
        self.model: Any = None
        self.loaded: tuple[str, str, str] | None = None
        self.trials: dict[int, Trial] = {}

    def load(self, model: str, device: str, dtype: str) -> dict[str, Any]:
        """Load a model unless it is loaded; the one before it is dropped."""
        import torch

        from benchmarks import models

        if self.loaded != (model, device, dtype):
            self.model = self.loaded = None
            self.model = models.load(model, torch.device(device), getattr(torch, dtype))
            self.loaded = (model, device, dtype)
        return {}

    def open(self, trial: int, kind: str, contender: str, tokens: int, case: dict[str, Any]) -> dict[str, Any]:
        """Begin a trial: a session of `sessions` on a case as `trees.described` gives it."""
        import torch

        from benchmarks import contenders, models, sessions

        fields = dict(case)
        config = models.config_of(fields.pop("model"))
        geometry = models.Geometry.of(config, getattr(torch, fields.pop("dtype")))
        device = torch.device(fields.pop("device"))
        this = contenders.Case(config=config, geometry=geometry, device=device, **fields)
        self.trials[trial] = sessions.session(kind, contenders.contender(contender), this, tokens, self.model)
        return {}

    def measure(self, trial: int) -> dict[str, Any]:
        """One turn."""
        return {"value": self.trials[trial].measure()}

    def facts(self, trial: int) -> dict[str, Any]:
        """Of a trial; none where another commit's statistics have other names."""
        with contextlib.suppress(AttributeError):
            return {"facts": self.trials[trial].facts()}
        return {"facts": {}}

    def close(self, trial: int) -> dict[str, Any]:
        """End a trial and return its memory."""
        from benchmarks.turns import release_memory

        found = self.trials.pop(trial, None)
        if found is not None:
            found.close()
            del found
        release_memory()
        return {}


def computing() -> dict[str, Any]:
    """The instruction set of the native library, where that commit says it; None if it is not in use."""
    try:
        from kvtier.cpu import native

        return {"instruction_set": native.instruction_set() if native.available() else None}
    except (ImportError, AttributeError):
        return {}


def serve(tree: Path, threads: int, cudnn_attention: bool, answers: TextIO) -> None:
    """Answer requests until there are no more.

    Args:
        tree: its kvtier is measured.
        threads: of torch; on a CPU, the process is also kept to that number of cores.
        cudnn_attention: whether torch's attention may use cuDNN.
        answers: where answers go.
    """

    def answer(fields: dict[str, Any]) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    version = import_kvtier(tree)
    import torch
    import transformers

    from benchmarks.cores import limited_to
    from benchmarks.turns import Outcome

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    if not cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    worker = Worker()
    cores = contextlib.nullcontext() if torch.cuda.is_available() else limited_to(threads)
    with cores, torch.inference_mode():
        answer({"kvtier": version} | computing())
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer(getattr(worker, request.pop("do"))(**request))
            except Exception as error:
                outcome = Outcome()
                outcome.end(error)
                answer({"status": outcome.status, "reason": outcome.reason})


def main() -> None:
    """Keep standard output for answers: whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tree, threads, cudnn_attention = sys.argv[1:]
    serve(Path(tree).resolve(), int(threads), cudnn_attention == "1", answers)


if __name__ == "__main__":
    main()
