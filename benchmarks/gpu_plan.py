"""What a GPU run consists of: its parts, the most valuable first, and how its time is shared out among them.

What is last is left out first when time runs short. Each part of a model's decoding has one context, so that what runs
over ends with that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"
#: Seconds of the whole run. What comes before, finding a Python and importing torch, may take as many again as are
#: missing from eight minutes.
TIME_LIMIT = 435.0
#: Sizes without CUDA: the same layers, everything else small, and each line of the tables once.
TINY = {LLAMA: "llama-tiny", QWEN: "qwen3-tiny"}
TINY_OPTIONS = {"--block-size": "16", "--new-tokens": "2", "--rounds": "1"}

#: 6.25% are two of Llama's 32 layers: what Transformers' offloading keeps on the device.
WITH_OFFLOADED = "dynamic,kvtier@100%,offloaded,kvtier@6.25%,fetch@6.25%,kvtier@50%,fetch@50%"
#: A little on the host is fetched in the shadow of a step, and should cost nothing.
FALLING = (
    "dynamic,kvtier@100%,fetch@95%,fetch@90%,fetch@80%,kvtier@50%,kvtier@25%,fetch@25%,kvtier@10%,fetch@10%,static"
)
SHORT = "dynamic,kvtier@100%,kvtier@50%,fetch@50%,static"
LONG = "dynamic,kvtier@100%,kvtier@25%,fetch@25%"
#: What adapts, against everything that does not, at two budgets.
POLICIES = ",".join(
    ["dynamic"] + [f"{name}@{x}%" for x in (75, 40) for name in ("adaptive", "all-attend", "all-fetch", "pie", "neo")]
)
MEMORY = "dynamic,kvtier@100%,kvtier@50%,fetch@50%,kvtier@10%,fetch@10%,offloaded,static"


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        name: for the table and `--only`; its first word is the scenario.
        seconds: its share of the time.
        arguments: of `python -m benchmarks`; none for the build, the calibration and the tests.
        tiny: these arguments replace those of the same name without CUDA. None: it is left out there, for all that it
            would show is shown by a part before.
        new_lengths: torch's attention meets keys of a new length at each step.
    """

    name: str
    seconds: float
    arguments: dict[str, str] = field(default_factory=dict)
    tiny: dict[str, str] | None = field(default_factory=dict)
    new_lengths: bool = True

    def command(self, *, cuda: bool, out: Path, seconds: float) -> list[str]:
        """The command line of a benchmark."""
        options = dict(self.arguments)
        if not cuda:
            options |= TINY_OPTIONS | (self.tiny or {})
            if "--model" in options:
                options["--model"] = TINY[options["--model"]]
        command = [sys.executable, "-m", "benchmarks", self.name.split()[0]]
        command += [f"{name}={value}" for name, value in options.items()]
        command += ["--dtype=bfloat16", f"--out={out}", f"--time-limit={seconds:.0f}"]
        command += ["--no-cudnn-attention"] if self.new_lengths else []
        return command if cuda else [*command, "--device=cpu", "--emulated", "--quick"]


def _decode(
    model: str,
    context: str,
    seconds: float,
    contenders: str,
    tiny: dict[str, str] | None,
    *,
    brief: bool = False,
    name: str = "",
) -> Part:
    # Four turns of 16 tokens fill one block: so much, or nothing, is written back.
    arguments = {
        "--model": model,
        "--cases": "loop",
        "--contexts": context,
        "--contenders": contenders,
        "--rounds": "1" if brief else "4",
        "--new-tokens": "8" if brief else "16",
    }
    words = ("decode", name or model.split("-")[0].rstrip("3"), context)
    return Part(" ".join(words), seconds, arguments, tiny)


PARTS = (
    Part("build", 12),
    Part("calibrate", 20),
    Part("kernels", 28, new_lengths=False),
    Part("link", 18, {"--model": LLAMA, "--contexts": "32k"}, {"--contexts": "4k"}),
    # Here a block has 16 tokens.
    _decode(LLAMA, "64k", 62, WITH_OFFLOADED, {"--contexts": "1k", "--rounds": "2", "--new-tokens": "8"}),
    Part("tests", 54),
    Part("predictions", 17, tiny=None, new_lengths=False),
    _decode(LLAMA, "16k", 28, POLICIES, {"--contexts": "256"}, name="policies"),
    _decode(LLAMA, "64k", 32, POLICIES, None, name="policies"),
    Part("overlap", 22, tiny={"--contexts": "256"}),
    Part("host", 12, {"--cases": "llama"}, new_lengths=False),
    Part("share llama", 16, {"--model": LLAMA, "--contexts": "16k", "--rounds": "3"}, {"--contexts": "256"}),
    Part(
        "memory llama",
        12,
        {"--model": LLAMA, "--cases": "caches", "--contexts": "32k", "--contenders": MEMORY, "--rounds": "1"},
        # There each is a process of its own, which takes seconds whatever it measures.
        {"--contexts": "256", "--contenders": "dynamic,kvtier@100%,fetch@10%"},
    ),
    _decode(LLAMA, "8k", 22, SHORT, None),
    _decode(LLAMA, "32k", 36, FALLING, {"--contexts": "256"}),
    _decode(LLAMA, "128k", 20, LONG, None, brief=True),
    Part(
        "update llama",
        8,
        {
            "--model": LLAMA,
            "--cases": "attend",
            "--contexts": "8k",
            "--contenders": "dynamic,kvtier@100%,kvtier@25%,fetch@25%",
            "--rounds": "5",
        },
        {"--contexts": "256"},
    ),
    # Without CUDA it would compile for as long as all others take.
    Part("launch", 8, tiny=None, new_lengths=False),
    _decode(QWEN, "8k", 8, SHORT, {"--contexts": "256"}),
)


#: What all others need.
FIRST = ("build", "calibrate")


def parts_named(text: str) -> list[Part]:
    """The parts whose names begin with one of the words, and those that all others need: build and calibrate.

    Raises:
        ValueError: a word that none begins with.
    """
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if not any(part.name.startswith(word) for part in PARTS)]
    if unknown or not all(words):
        names = ", ".join(part.name for part in PARTS)
        raise ValueError(f"no part {', '.join(unknown) or text!r}; there are {names}")
    return [part for part in PARTS if part.name in FIRST or any(part.name.startswith(word) for word in words)]


def share_of(part: Part, rest: Sequence[Part], left: float) -> float:
    """Seconds for a part, the first of `rest`: what earlier ones did not use, or used beyond theirs, is shared out."""
    return part.seconds / sum(x.seconds for x in rest) * left
