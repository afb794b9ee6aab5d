"""Time to the first token of a turn after a long history of a model of 0.6B parameters, from host memory.

The shape is that of a real model with random weights, in bfloat16; the keys and values of the history are random too:
nothing that is measured depends on what they are, and to compute those of 32,768 tokens takes a CPU a quarter of an
hour. What computing again takes is measured for the shortest history and for half of it; of longer ones it follows from
these, as a multiple of the tokens and one of their square.

What a store costs where it re-uses nothing is measured with prompts that nothing begins like, against plain `generate`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel

import kvtier
from benchmarks import models
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier.conversation.index import packed
from kvtier.hf.models.identity.dependence import computed_as

SUMMARY = "a turn after a long history, 0.6B shape, kept in host memory against computed again (CPU only)"
NAME = "store_turns"
MODEL = "qwen3-0.6b"
CONTEXTS = (8192, 32768)
#: New tokens of a turn, and turns; tokens that are filled in at once.
NEW, TURNS, PORTION = 64, 3, 2048
#: Prompts that nothing begins like: pairs of calls, one of them by a store, their tokens, and new ones.
PAIRS, PROMPT, ANSWER = 9, 512, 16


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        return
    name = "qwen3-tiny" if bench.settings.quick else MODEL
    contexts = bench.settings.contexts or ((512, 1024) if bench.settings.quick else CONTEXTS)
    model = models.load(name, bench.settings.device, torch.bfloat16)
    with torch_threads(torch.get_num_threads()):
        measure(bench, name, model, contexts)
        measure_cost(bench, name, model)


def some(model: PreTrainedModel, tokens: int, draw: torch.Generator) -> torch.Tensor:
    """Token ids, `[1, tokens]`."""
    return torch.randint(5, model.config.vocab_size, (1, tokens), generator=draw)


def seconds(generate: Callable[..., torch.Tensor], ids: torch.Tensor, new: int = 1, **options: object) -> float:
    """Until the first tokens are known."""
    began = time.perf_counter()
    mask = torch.ones_like(ids)
    generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)[0, -1].item()
    return time.perf_counter() - began


def fill(store: kvtier.ConversationStore, ids: torch.Tensor, draw: torch.Generator) -> None:
    """Keep a history without computing it."""
    config, tokens = store.model.config, ids.shape[1]
    with store.caches.new() as cache:
        for at in range(0, tokens, PORTION):
            shape = 1, config.num_key_value_heads, min(PORTION, tokens - at), config.head_dim
            for i in range(config.num_hidden_layers):
                keys, values = (torch.randn(shape, generator=draw).to(torch.bfloat16) for _ in range(2))
                cache._forward.restore(i, keys, values)
            cache._forward.steps.end()
        kept = store._kept.keep(
            cache, (computed_as(store.model), None), 0, 0, packed(ids[0].tolist()), {}, epoch=store._kept.epoch
        )
        assert kept is not None, "the host has no room for the history"


def measure(bench: Bench, name: str, model: PreTrainedModel, contexts: tuple[int, ...]) -> None:
    """Measure each length; print and record the figures."""
    draw, shortest = torch.Generator("cpu").manual_seed(0), min(contexts)
    again = dict[int, float]()
    seconds(model.generate, some(model, NEW, draw))  # whatever is done once in a process
    for tokens in (shortest // 2, shortest):
        bench.progress(f"{NAME}: computing {tokens + NEW:,} tokens")
        ids = some(model, tokens + NEW, draw)
        again[tokens] = seconds(model.generate, ids, past_key_values=DynamicCache(config=model.config))
    # As a * tokens + b * tokens ** 2.
    square = max(2 * (again[shortest] - 2 * again[shortest // 2]) / shortest**2, 0.0)
    each = again[shortest] / shortest - square * shortest
    rows, targets = [], []
    for context in contexts:
        bench.progress(f"{NAME}: a history of {context:,} tokens")
        with kvtier.ConversationStore(model) as store:
            history = some(model, context, draw)
            fill(store, history, draw)
            kept = []
            for _ in range(TURNS):
                kept.append(seconds(store.generate, torch.cat([history, some(model, NEW, draw)], 1)))
                assert store.reuse[0].cached == context
        computed = again.get(context, each * context + square * context**2)
        workload = {"model": models.label(name), "dtype": "bfloat16", "context": context, "new_tokens": NEW, "batch": 1}
        for way, times in (("kept", kept), ("computed again", [computed])):
            median, low, high = statistics.median(times), min(times), max(times)
            facts = {"low": low, "high": high, "follows_from": None if context in again or way == "kept" else [*again]}
            rows.append([f"{context:,}", way, number(median), f"{number(low)} .. {number(high)}"])
            ratio = median / computed if way == "kept" else None
            bench.record(
                NAME, contender=way, workload=workload, unit="s", median=median, n=len(times), ratio=ratio, facts=facts
            )
        limit = 1 / 40 if context >= 32768 else 1 / 20
        targets.append(
            Target(f"kept / computed again, {context:,} tokens", statistics.median(kept) / computed, "<=", limit)
        )
    bench.progress("")
    print(f"{NAME} · {models.label(name)} · a turn of {NEW} tokens")
    print(table(["tokens", "", "seconds to the first token", "low .. high"], rows))
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload={"model": models.label(name)}, **target.fields())


def measure_cost(bench: Bench, name: str, model: PreTrainedModel) -> None:
    """Measure what a store costs that re-uses nothing; print and record the figure."""
    draw, pairs = torch.Generator("cpu").manual_seed(1), 2 if bench.settings.quick else PAIRS
    model.generation_config.eos_token_id = None
    ratios, found = [], dict[str, list[float]](store=[], plain=[])
    with kvtier.ConversationStore(model) as store:
        for i in range(-1, pairs):
            bench.progress(f"{NAME}: prompts that nothing begins like, {max(i, 0)} of {pairs}")
            ids = some(model, PROMPT, draw)
            took = dict[str, float]()
            for way in ("store", "plain") if i % 2 else ("plain", "store"):
                if way == "store":
                    took[way] = seconds(store.generate, ids, ANSWER)
                    assert not store.reuse[0].cached
                else:
                    cache = DynamicCache(config=model.config)
                    took[way] = seconds(model.generate, ids, ANSWER, past_key_values=cache)
            if i >= 0:  # whatever is done once in a store
                ratios.append(took["store"] / took["plain"])
                for way, times in found.items():
                    times.append(took[way])
    bench.progress("")
    workload = {
        "model": models.label(name), "dtype": "bfloat16", "context": PROMPT, "new_tokens": ANSWER, "batch": 1
    }  # fmt: skip
    for way, times in found.items():
        facts = {"low": min(times), "high": max(times)}
        ratio = statistics.median(ratios) if way == "store" else None
        bench.record(
            NAME,
            contender=f"nothing re-used, {way}",
            workload=workload,
            unit="s",
            median=statistics.median(times),
            n=pairs,
            ratio=ratio,
            facts=facts | ({} if ratio is None else {"ratio_low": min(ratios), "ratio_high": max(ratios)}),
        )
    target = Target("a store that re-uses nothing / plain", statistics.median(ratios), "<=", 1.02)
    print(f"{NAME} · prompts of {PROMPT} tokens that nothing begins like, {ANSWER} new ones")
    print(f"\n{table_of([target])}\n", flush=True)
    bench.record(NAME, workload=workload, **target.fields())
