"""Load generators that others wrote, unmodified, against `kvtier serve` with the example model: none of their requests
may fail, and the server and they must count the same.

    make judge
    python integrations/judge.py guidellm      # one of them

aiperf and guidellm each have an environment of their own in `.venv-integrations`, made at the first run. One that
cannot be installed is an error: what is not judged has not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run import ROOT, Unavailable, python_for

PYLM = ROOT / "examples" / "pylm"
MODEL = "pylm"
REQUESTS, STREAMS, TURNS = 24, 4, 3
#: Seconds that a tool may take.
LONGEST = 300


@dataclass(frozen=True)
class Found:
    """What a tool has counted.

    Attributes:
        done, failed: requests.
        tokens: of answers, by the server's `usage`.
        first: milliseconds to the first token, at the median; None: it says none.
        rate: tokens of answers in a second.
    """

    done: int
    failed: int
    tokens: float
    first: float | None
    rate: float


@dataclass(frozen=True)
class Case:
    """One run of a tool.

    Attributes:
        tool: its package.
        name: what it asks.
        command: behind its program, for a URL and a folder of its own.
        read: what it has written there.
    """

    tool: str
    name: str
    command: Callable[[str, Path], list[str]]
    read: Callable[[Path], Found]


def aiperf(kind: str, *more: str) -> Callable[[str, Path], list[str]]:
    """A command of aiperf. Its tokenizer wants an absolute path."""

    def command(url: str, folder: Path) -> list[str]:
        options = ["profile", "--model", MODEL, "--url", url, "--endpoint-type", kind, "--tokenizer", str(PYLM)]
        options += ["--artifact-dir", str(folder), "--ui", "none", "--random-seed", "1", "--use-server-token-count"]
        options += ["--concurrency", str(STREAMS), "--synthetic-input-tokens-mean", "60"]
        return [*options, "--output-tokens-mean", "12", "--extra-inputs", "ignore_eos:true", *more]

    return command


def read_aiperf(folder: Path) -> Found:
    """What it has exported."""
    (path,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text(encoding="utf-8"))

    def value(name: str, what: str = "avg") -> float:
        return float((found.get(name) or {}).get(what) or 0)

    errors = sum(int(each.get("count", 1)) for each in found.get("error_summary") or [])
    return Found(
        int(value("request_count")),
        errors,
        value("total_output_tokens") or value("total_usage_completion_tokens"),
        value("time_to_first_token", "p50") or None,
        value("output_token_throughput"),
    )


def guidellm(path: str, turns: int = 1) -> Callable[[str, Path], list[str]]:
    """A command of guidellm."""

    def command(url: str, folder: Path) -> list[str]:
        options = ["run", "--backend", f"kind=openai_http,target={url},model={MODEL},request_format={path}"]
        options += ["--profile", f"kind=concurrent,streams={STREAMS}", "--tokenizer", f"kind=hf_auto,model={PYLM}"]
        options += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-console-interactive"]
        options += ["--data", f"kind=synthetic_text,prompt_tokens=60,output_tokens=12,turns={turns}"]
        return [*options, "--output", f"kind=json,path={folder / 'report.json'}"]

    return command


def read_guidellm(folder: Path) -> Found:
    """Its report."""
    (benchmark,) = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics, requests = benchmark["metrics"], benchmark["requests"]
    done, failed = requests["successful"], requests["errored"]
    for request in failed[:3]:
        print("  ", str(request.get("info", request))[:300], file=sys.stderr)
    first = metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"]
    rate = metrics["output_tokens_per_second"]["successful"]["mean"]
    return Found(len(done), len(failed), sum(x["output_tokens"] or 0 for x in done), first or None, rate)


CASES = (
    Case("aiperf", "chat, streamed", aiperf("chat", "--streaming", "--request-count", str(REQUESTS)), read_aiperf),
    Case("aiperf", "completions", aiperf("completions", "--request-count", str(REQUESTS)), read_aiperf),
    Case(
        "aiperf",
        f"sessions of {TURNS} turns",
        aiperf("chat", "--streaming", "--conversation-num", "8", "--conversation-turn-mean", str(TURNS)),
        read_aiperf,
    ),
    Case("guidellm", "chat, streamed", guidellm("/v1/chat/completions"), read_guidellm),
    Case("guidellm", "completions, streamed", guidellm("/v1/completions"), read_guidellm),
    Case("guidellm", "responses, streamed", guidellm("/v1/responses"), read_guidellm),
    Case("guidellm", f"sessions of {TURNS} turns", guidellm("/v1/chat/completions", TURNS), read_guidellm),
)
PACKAGES = {"aiperf": ("aiperf==0.13.0",), "guidellm": ("torch", "guidellm==0.8.1")}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server, and its URL."""
    command = [sys.executable, "-m", "kvtier", "serve", str(PYLM), "--served-model-name", MODEL, "--port", "0"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"  # a pipe that nobody reads would fill, and the server wait
        with (
            said.open("wb") as stderr,
            subprocess.Popen([*command, "--host-budget", "512MiB"], stderr=stderr, env=env) as process,
        ):
            try:
                while not (found := re.search(r"http://[\d.]+:\d+", said.read_text(errors="replace"))):
                    if process.poll() is not None:
                        raise SystemExit(f"the server did not start\n{said.read_text(errors='replace')}")
                    time.sleep(0.1)
                yield found[0]
            finally:
                process.terminate()


def counted(url: str) -> dict[str, float]:
    """What the server has counted: finished and refused requests, tokens, tokens that were there."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    names = ("request_success_total", "request_refused_total", "generation_tokens_total", "prefix_cache_hits_total")
    return {name: sum(float(value) for key, value in lines if key.startswith(f"kvtier:{name}")) for name in names}


def judge(case: Case, python: str, url: str) -> bool:
    """Run a case, and print a line. Whether all is well."""
    before, began = counted(url), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = Path(python).with_name(case.tool)
        # aiperf takes a path for a name on the hub if it is told that there is no hub.
        env = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
        env |= {"COLUMNS": "120"} | ({} if case.tool == "aiperf" else {"HF_HUB_OFFLINE": "1"})
        output = ""
        try:
            done = subprocess.run(
                [program, *case.command(url, folder)],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
            output = (done.stdout + done.stderr)[-3000:]
            found = case.read(folder)
        except (subprocess.TimeoutExpired, OSError, ValueError, KeyError, TypeError) as error:
            print(f"{case.tool:<9} {case.name:<22} failed: {error!r}\n{output}", flush=True)
            return False
    server = {key: value - before[key] for key, value in counted(url).items()}
    well = not done.returncode and found.done > 0 and not found.failed and not server["request_refused_total"]
    first = "" if found.first is None else f"{found.first:.0f}"
    print(
        f"{case.tool:<9} {case.name:<22} {found.done:>5} {found.failed:>6} {server['request_refused_total']:>8.0f} "
        f"{found.tokens:>7.0f} {server['generation_tokens_total']:>9.0f} {server['prefix_cache_hits_total']:>7.0f} "
        f"{first:>8} {found.rate:>9.1f} {time.monotonic() - began:>6.0f}  {'passed' if well else 'FAILED'}",
        flush=True,
    )
    if not well:
        print(output, flush=True)
    return well


def main() -> int:
    """Returns 0 if no request has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"{', '.join(PACKAGES)} (all)")
    args = parser.parse_args()
    if unknown := [name for name in args.tools if name not in PACKAGES]:
        parser.error(f"no tool {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    pythons: dict[str, str] = {}
    failed: list[Any] = []
    for tool in args.tools or PACKAGES:
        try:
            pythons[tool] = python_for(tool, PACKAGES[tool], shared=False)
        except Unavailable as error:
            print(f"{tool:<9} cannot be installed: {error}")
            failed.append(tool)
    print("tool      what                    done failed  refused  tokens  server's  cached first ms  tokens/s      s")
    with serving() as url:
        failed += [case for case in CASES if case.tool in pythons and not judge(case, pythons[case.tool], url)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
