"""Memory that a cache takes at each context: what it holds, and the peak of the process or the device.

Each measurement of a process's memory is a process of its own, so that none sees what another left behind.

caches  the cache without a model. The peak is that of filling it and of a few decode steps, above what was in use
        before: on CUDA, of the device memory that torch allocated; else, of the process's resident memory.
decode  a model on the CPU decodes with it: how far the process's resident memory grows beyond what it had before there
        was a cache, at most, against the exact bytes of the keys and values.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.contenders import Case, Contender, Unavailable, contender, fill, held_bytes, random_kv, tier_facts
from benchmarks.harness import Bench
from benchmarks.models import Geometry, config_of, label, load
from benchmarks.records import ROOT, size
from benchmarks.scenarios.update import WARM_UP_STEPS, UpdateSession
from benchmarks.turns import Outcome, Start, TrialEnded, release_memory, synchronize

SUMMARY = "bytes held and peak memory at each context"
CONTEXTS = (1024, 4096, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@25%", "static", "fp8", "offloaded")

CASES = ("caches", "decode")
DECODE_CONTEXTS = (1024, 8192)
DECODE_CONTENDERS = ("dynamic", "kvtier", "static")
DECODE_TOKENS = 256
#: A process that decodes with a tiered cache on the CPU may grow by ALLOWED_TIMES x its KV + ALLOWED_BEYOND bytes.
ALLOWED_TIMES = 1.02
ALLOWED_BEYOND = 64_000_000

STEPS = 4
#: First use of anything loads code and tables; that happens at this context.
WARM_UP_CONTEXT = 128
TIME_LIMIT = 300


class MemorySession:
    """Measures in a child process.

    Args:
        job: what the child is to do, ready for JSON.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.found: dict[str, Any] = {}

    def measure(self) -> float:
        """The peak in MiB."""
        if self.job["device"].startswith("cuda"):
            # What was there before is not counted by torch's allocator: this needs no process of its own.
            self.found = measure(self.job)
            return self.found["peak_bytes"] / 2**20
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scenarios.memory", json.dumps(self.job)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise RuntimeError(f"the measuring process failed: {last}")
        found = json.loads(done.stdout.splitlines()[-1])
        if found["status"] != "ok":
            raise TrialEnded(found["status"], found["reason"])
        self.found = found["facts"]
        return self.found["peak_bytes"] / 2**20

    def facts(self) -> dict[str, Any]:
        """Everything that the last child found, in bytes."""
        return self.found

    def close(self) -> None:
        """Nothing: the child is gone."""


def note(facts: dict[str, Any]) -> str:
    """What the cache holds, and what is left in use by it."""
    held = f"holds {size(facts['held_bytes'])}"
    budget = f", device budget {size(facts['device_budget'])}" if facts.get("device_budget") else ""
    return f"{held} of {size(facts['kv_bytes'])} KV{budget}"


def note_growth(facts: dict[str, Any]) -> str:
    """The growth against the KV."""
    share = facts["peak_bytes"] / facts["allowed_bytes"]
    return f"{size(facts['kv_bytes'])} of KV; {share:.0%} of {ALLOWED_TIMES} x KV + {ALLOWED_BEYOND // 10**6} MB"


def run(bench: Bench) -> None:
    """Run the scenario."""
    settings = bench.settings
    for model in bench.model_names("pylm"):
        if bench.selected("caches"):
            for case in bench.cases("memory", model, CONTEXTS, WARM_UP_STEPS + STEPS):
                starts = _starts(bench, model, case, 0, *CONTENDERS)
                peak = "device" if settings.device.type == "cuda" else "process"
                bench.compare(
                    "memory", model, case, starts, unit="MiB peak", rounds=bench.rounds(3), note=note, peak_of=peak
                )
        if bench.selected("decode"):
            if settings.device.type != "cpu":
                print(
                    "memory, decode: not measured, for it is about a process whose model runs on the CPU\n", flush=True
                )
                continue
            tokens = bench.tokens(DECODE_TOKENS)
            for case in bench.cases("memory", model, DECODE_CONTEXTS, tokens):
                bench.compare(
                    "memory",
                    model,
                    case,
                    _starts(bench, model, case, tokens, *DECODE_CONTENDERS),
                    unit="MiB growth",
                    rounds=bench.rounds(3),
                    note=note_growth,
                    detail=f"a process that decodes {tokens} tokens",
                    peak_of="process",
                    decoded=tokens,
                )


def _starts(
    bench: Bench, model: str, case: Case, decode: int, *names: str
) -> dict[str, tuple[Contender | None, Start]]:
    starts: dict[str, tuple[Contender | None, Start]] = {}
    for one in bench.contenders(*names):
        job = {
            "model": model,
            "contender": one.name,
            "context": case.context,
            "batch": case.batch,
            "decode": decode,
            "block_size": case.block_size,
            "device": str(case.device),
            "dtype": str(case.geometry.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        starts[one.name] = (one, partial(MemorySession, job))
    return starts


# ------------------------------------------------------------------------------------------ the child


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run one cache and say what it took. Raises whatever the cache raises."""
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    config = config_of(job["model"])
    geometry = Geometry.of(config, getattr(torch, job["dtype"]))
    one = contender(job["contender"])
    # For first uses only: a budget that is a share of so little KV may be too small, and says so.
    warm_up = contender("kvtier@100%") if "@" in one.name else one
    decode = job["decode"]

    def case(context: int, new_tokens: int) -> Case:
        return Case(config, geometry, device, context, new_tokens, job["block_size"], job["batch"])

    session: Callable[..., Any]
    if decode:
        model = load(job["model"], device, geometry.dtype)
        session, real = partial(_Decoding, model=model), case(job["context"], decode)
        session(warm_up, case(WARM_UP_CONTEXT, decode), min(decode, 16)).close()
    else:
        session, real = UpdateSession, case(job["context"], WARM_UP_STEPS + STEPS)
        session(warm_up, case(WARM_UP_CONTEXT, real.new_tokens), STEPS).close()
    release_memory()

    kv = random_kv(real)
    synchronize(device)
    rss, allocated = _reset_peaks(device)
    trial = session(one, real, decode or STEPS, kv)
    trial.run_turn()
    rss_peak = _status("VmHWM") - rss
    kv_bytes = real.batch * geometry.kv_bytes(real.context + trial.done)
    facts = {
        "model": label(job["model"]),
        "kv_bytes": kv_bytes,
        "held_bytes": held_bytes(trial.cache),
        "rss_bytes": _status("VmRSS") - rss,
        "rss_peak_bytes": rss_peak,
        "peak_bytes": rss_peak,
    } | tier_facts(trial.cache)
    if decode:
        facts["allowed_bytes"] = ALLOWED_TIMES * kv_bytes + ALLOWED_BEYOND
    if device.type == "cuda":
        facts["torch_bytes"] = torch.cuda.memory_allocated(device) - allocated
        facts["peak_bytes"] = torch.cuda.max_memory_allocated(device) - allocated
        facts["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    trial.close()
    return facts


class _Decoding:
    """A model that decodes with a cache full of random KV. Making it decodes nothing yet."""

    def __init__(
        self,
        contender: Contender,
        case: Case,
        tokens: int,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        model: PreTrainedModel,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.done = 0
        self.token = torch.zeros((case.batch, 1), dtype=torch.long)
        self.cache = contender.build(case)
        fill(self.cache, case, kv)
        if kv is None:
            self.run_turn()

    def run_turn(self) -> None:
        """Decode all tokens."""
        for _ in range(self.tokens):
            logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
            self.token = logits[:, -1:].argmax(-1)
            self.done += 1

    def close(self) -> None:
        """Drop the cache."""
        if hasattr(self.cache, "close"):
            self.cache.close()
        del self.cache


def _reset_peaks(device: torch.device) -> tuple[int, int]:
    """Reset the peaks; returns what is in use, of the process and of the device."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError as error:
        if not cuda:
            raise Unavailable("the system does not let a process reset its memory peak") from error
    if cuda:
        return _status("VmRSS"), torch.cuda.memory_allocated(device)
    return _status("VmRSS"), 0


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise Unavailable("the process's memory is read from /proc, which this system does not have")


def child(text: str) -> None:
    """Measure and print the outcome as one line of JSON."""
    outcome = Outcome()
    try:
        with torch.inference_mode():
            outcome.facts = measure(json.loads(text))
    except Exception as error:
        outcome.end(error)
    print(json.dumps({"status": outcome.status, "reason": outcome.reason, "facts": outcome.facts}))


if __name__ == "__main__":
    child(sys.argv[1])
