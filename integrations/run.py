"""Run every script of this folder with the library that it is about, each in an environment of its own.

    make integrations
    python integrations/run.py peft trl      # some of them

An environment is made at the first run, in `.venv-integrations`, and sees the packages of the Python that runs this;
its own are installed beside, and change none of these. What cannot be installed is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".venv-integrations"
#: Packages that no library here may replace.
FIXED = ("torch", "transformers", "huggingface_hub", "tokenizers", "safetensors", "accelerate", "numpy", "triton")
#: Seconds that a script may take, and that an installation may.
LONGEST, LONGEST_SETUP = 600, 900


@dataclass(frozen=True)
class Integration:
    """A script, and what it needs.

    Attributes:
        script: in this folder.
        packages: requirements beside those of kvtier.
    """

    script: str
    packages: tuple[str, ...] = ()


INTEGRATIONS = {
    "accelerate": Integration("accelerate_generate.py"),
    "pipeline": Integration("pipeline_prompts.py"),
    "peft": Integration("peft_generate.py", ("peft",)),
    "langchain": Integration("langchain_pipeline.py", ("langchain-huggingface",)),
    "lm-eval": Integration("lm_eval_task.py", ("lm-eval",)),
    "outlines": Integration("outlines_regex.py", ("outlines",)),
    "trl": Integration("trl_grpo.py", ("trl",)),
    "tensor-parallel": Integration("tensor_parallel.py"),
    "ray": Integration("ray_serve.py", ("ray[serve]",)),
    "serve": Integration("serve.py", ("fastapi", "uvicorn", "openai", "python-multipart")),
}


class Unavailable(Exception):
    """An environment cannot be made; the message says why."""


def fixed() -> list[str]:
    """Constraints: what is installed here stays as it is."""
    found = []
    for name in FIXED:
        try:
            found.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def python_for(name: str, packages: tuple[str, ...], *, shared: bool = True) -> str:
    """The Python of an environment with these packages, made if it is not there.

    Args:
        shared: whether it sees the packages of the Python that runs this; if not, it has whatever versions it wants,
            torch aside.

    Raises:
        Unavailable: it cannot be made.
    """
    if not packages:
        return sys.executable
    folder = ENVIRONMENTS / name
    ready, python = folder / ".ready", folder / "bin" / "python"
    kept = [pin for pin in fixed() if shared or pin.startswith("torch==")]
    wanted = "\n".join([*packages, *kept, sys.version])
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return str(python)
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:  # a folder that is read only, a Python without ensurepip
        raise Unavailable(f"no environment can be made: {error}") from error
    if shared:
        _share(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept), encoding="utf-8")
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "-c",
        constraints,
        *packages,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SETUP)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip took longer than {LONGEST_SETUP} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((errors or done.stderr.strip().splitlines() or ["pip failed"])[-1])
    ready.write_text(wanted, encoding="utf-8")
    return str(python)


def _share(folder: Path) -> None:
    """Let an environment see the packages of the Python that runs this."""
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def run(name: str) -> tuple[str, str]:
    """Run one. Returns "passed", "failed" or "skipped", and what it said."""
    integration = INTEGRATIONS[name]
    try:
        python = python_for(name, integration.packages)
    except Unavailable as error:
        return "skipped", str(error)
    env = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [python, str(HERE / integration.script)], env=env, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return "failed", f"it took longer than {LONGEST} s"
    if done.returncode:
        return "failed", (done.stdout + done.stderr)[-4000:]
    return "passed", next((x for x in reversed(done.stdout.splitlines()) if x.strip()), "")


def main() -> int:
    """Returns 0 unless one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(INTEGRATIONS)} (all)")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in INTEGRATIONS]
    if unknown:
        parser.error(f"no integration {', '.join(unknown)}; there are {', '.join(INTEGRATIONS)}")
    failed = 0
    for name in args.names or INTEGRATIONS:
        began = time.monotonic()
        result, said = run(name)
        failed += result == "failed"
        print(f"{name:<17}{result:<9}{time.monotonic() - began:>6.0f} s  {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
