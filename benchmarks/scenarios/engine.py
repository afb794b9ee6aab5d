"""Many requests: kvtier's engine, Transformers' own continuous batching, and `generate` in left-padded batches.

Each run is a process of its own, with a fresh model: a second team of threads in one process slows torch down. The
contenders take turns. All decode greedily, and their tokens are compared.

apart      nothing is shared; lengths of prompts and answers are those of the Azure LLM inference trace of 2023
           (conversations; Patel et al., ISCA 2024), by its 5-percent quantiles, divided by 4
prefixes   groups of requests whose prompts begin with the same 512 tokens
turns      conversations of three turns, each turn's prompt being the whole history; the lengths of a turn are those of
           `apart`, divided by 2
quarter    as `apart`, with a quarter of the KV memory that all requests together need

kvtier          `Engine.generate_batch`
generate_batch  Transformers', with pages of 16 tokens and shared pages; it has as many bytes of KV as kvtier, its masks
                not counted against it. (Its swap space needs an accelerator.)
generate        batches of 16, sorted by the length of the prompts, each as long as its longest answer
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from benchmarks.children import Children
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of

SUMMARY = "many requests: the engine, continuous batching of Transformers, and left-padded batches (CPU only)"
NAME = "engine"
MODEL = "llama-8x512"
ROWS, ROUNDS = (16, 64), 3
CASES = ("apart", "prefixes", "turns", "quarter")
#: Of every contender: with more, a machine that others use too makes their teams wait for each other.
THREADS = 1
WAYS = ("kvtier", "generate_batch", "generate")
#: By load: what kvtier's tokens per second are to be, as a multiple of those of the other ways.
LIMITS = {
    "apart": {"generate_batch": 1.3, "generate": 1.2},
    "prefixes": {"generate_batch": 2.0, "generate": 2.0},
    "turns": {"generate_batch": 2.0, "generate": 2.0},
    "quarter": {"generate_batch": 1.3},
}

CHILD = """
import hashlib, json, random, sys, time
import torch
said = json.loads(sys.argv[1])
torch.set_num_threads(said["threads"])
from transformers import GenerationConfig
from transformers.utils import logging
from benchmarks.models import load
logging.set_verbosity_error()
PROMPTS = [181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1877, 2735, 4083]
ANSWERS = [41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451]
model = load(said["model"], torch.device("cpu"), torch.float32)
rng, vocabulary, case, rows = random.Random(said["seed"]), model.config.vocab_size, said["case"], said["rows"]

def some(n):
    return [rng.randrange(5, vocabulary) for _ in range(n)]

less = 8 if case == "turns" else 4
prompts = [some(max(rng.choice(PROMPTS) // less, 1)) for _ in range(rows)]
turns = 3 if case == "turns" else 1
answers = [[max(rng.choice(ANSWERS) // less, 2) for _ in range(rows)] for _ in range(turns)]
asked = [[some(max(rng.choice(PROMPTS) // (4 * less), 1)) for _ in range(rows)] for _ in range(turns)]
if case == "prefixes":
    heads = [some(512) for _ in range(max(rows // 8, 1))]
    prompts = [heads[i % len(heads)] + some(rng.choice((8, 16, 32))) for i in range(rows)]
longest = sum(len(p) for p in prompts) + sum(map(sum, answers)) + sum(len(x) for each in asked[1:] for x in each)
pages = -(-longest // 16) + rows
if case == "quarter":
    pages = max(pages // 4, max(-(-(len(p) + n) // 16) + 1 for p, n in zip(prompts, answers[0])) + 2)
config = model.config
page_bytes = 16 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

def kvtier_way():
    import kvtier
    # Its workspace is part of its budget.
    engine = kvtier.Engine(model, host_budget=pages * page_bytes, block_size=16, max_batch_tokens=512)
    def run(prompts, counts):
        names = [engine.add_request(p, max_new_tokens=n, **plain) for p, n in zip(prompts, counts)]
        while engine.step():
            pass
        return [engine.output(name).generated_tokens for name in names]
    return run, engine.close

def generate_batch_way():
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    sizes = {"page_size": 16} if hasattr(ContinuousBatchingConfig(), "page_size") else {"block_size": 16}
    made = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=512, allow_block_sharing=True, **sizes)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=made,
    )
    manager.start()
    def run(prompts, counts):
        where = {manager.add_request(p, max_new_tokens=n): i for i, (p, n) in enumerate(zip(prompts, counts))}
        found, left = [None] * len(prompts), len(prompts)
        while left:
            got = manager.get_result(timeout=1)
            if got is None:
                if not manager.is_running():
                    raise RuntimeError("its worker has ended")
            elif got.is_finished():
                if got.error:
                    raise RuntimeError(got.error)
                found[where[got.request_id]] = got.generated_tokens
                left -= 1
        return found
    return run, lambda: manager.stop(block=True)

def generate_way():
    def run(prompts, counts):
        found = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), 16):
            some = order[first : first + 16]
            width = max(len(prompts[i]) for i in some)
            ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in some])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in some])
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(counts[i] for i in some), **plain)
            for row, i in enumerate(some):
                found[i] = out[row, width : width + counts[i]].tolist()
        return found
    return run, lambda: None

run, close = {"kvtier": kvtier_way, "generate_batch": generate_batch_way, "generate": generate_way}[said["way"]]()
run([some(20), some(40)], [4, 4])  # whatever is done once in a process
seconds, said_tokens, digests = 0.0, 0, []
for turn in range(turns):
    began = time.perf_counter()
    got = run(prompts, answers[turn])
    seconds += time.perf_counter() - began
    said_tokens += sum(map(len, got))
    digests += [hashlib.blake2b(json.dumps(x).encode(), digest_size=8).hexdigest() for x in got]
    if turn + 1 < turns:
        prompts = [p + g + x for p, g, x in zip(prompts, got, asked[turn + 1])]
close()
print(json.dumps([seconds, said_tokens, digests]))
"""


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        return
    model = (bench.model_names(MODEL) or [MODEL])[0]
    rounds = bench.rounds(ROUNDS)
    with Children() as children:
        for case in filter(bench.selected, CASES):
            for rows in (4,) if bench.settings.quick else ROWS:
                found: dict[str, list[tuple[float, list[str]]]] = {way: [] for way in WAYS}
                problems: dict[str, str] = {}
                ways = [way for way in WAYS if case != "quarter" or way != "generate"]
                for n in range(rounds):
                    for way in ways:
                        bench.progress(f"{NAME}: {case}, {rows} rows, round {n + 1}, {way}")
                        said = {
                            "model": model,
                            "case": case,
                            "rows": rows,
                            "seed": 7 + n,
                            "way": way,
                            "threads": THREADS,
                        }
                        ended = children.run([sys.executable, "-c", CHILD, json.dumps(said)], 400, keep=True)
                        if ended.code != 0:
                            problems[way] = (ended.tail.strip().splitlines() or ["it ran too long"])[-1]
                            continue
                        seconds, tokens, digests = json.loads(ended.tail.splitlines()[-1])
                        found[way].append((tokens / seconds, digests))
                report(bench, model, case, rows, found, problems)
    bench.progress("")


def report(
    bench: Bench,
    model: str,
    case: str,
    rows: int,
    found: dict[str, list[tuple[float, list[str]]]],
    problems: dict[str, str],
) -> None:
    """Print and record the figures of one load."""
    bench.progress("")
    workload: dict[str, Any] = {"model": label(model), "load": case, "requests": rows, "threads": THREADS}
    mine, lines, targets = found["kvtier"], [], []
    for way, those in found.items():
        if not those:
            if way in problems:
                lines.append([way, "-", problems[way][:60], "-", "-"])
            continue
        rates = [rate for rate, _ in those]
        paired = list(zip(mine, those, strict=False))
        ratio = statistics.median(a / b for (a, _), (b, _) in paired) if way != "kvtier" else None
        # In a model with random weights two tokens may be equally likely: rounding decides, and what follows differs.
        answers = [x == y for (_, a), (_, b) in paired for x, y in zip(a, b, strict=True)]
        low, high = min(rates), max(rates)
        lines.append(
            [
                way,
                number(statistics.median(rates)),
                f"{number(low)} .. {number(high)}",
                "" if ratio is None else number(ratio),
                f"{sum(answers)} of {len(answers)}",
            ]
        )
        facts = {"low": low, "high": high, "answers": len(answers), "equal_answers": sum(answers)}
        bench.record(
            NAME,
            contender=way,
            workload=workload,
            unit="tokens/s",
            median=statistics.median(rates),
            n=len(rates),
            ratio=ratio,
            facts=facts,
        )
        if way in LIMITS[case] and ratio is not None:
            targets.append(Target(f"kvtier / {way}, {case}, {rows} requests", ratio, ">=", LIMITS[case][way]))
    print(f"{NAME} · {label(model)} · {case} · {rows} requests")
    print(table(["", "tokens/s", "low .. high", "kvtier is x", "equal answers"], lines))
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
