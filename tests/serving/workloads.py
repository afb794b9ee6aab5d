"""Random loads of an engine, and what each request must get: the tokens of `generate`, or of the request alone."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from families import WINDOW, build_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvtier
from kvtier import BudgetError, ConversationStore, Engine

#: Tokens of the longest answers.
NEW = 18
#: Of requests that sample.
TEMPERATURE, TOP_K = 1.5, 20
#: A small model that was really trained.
TRAINED = Path(__file__).resolve().parents[2] / "examples" / "pylm"
#: Open files of this process, where the system lists them.
HANDLES = Path("/proc/self/fd")
#: How a model is built: family, attention, settings; and how it is run.
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "trained": (str(TRAINED), "sdpa", {}, "packed"),
    "llama": ("llama", "sdpa", {}, "packed"),
    "qwen3": ("qwen3", "sdpa", {}, "packed"),
    "qwen2": ("qwen2", "sdpa", {}, "packed"),
    "gemma3": ("gemma3", "sdpa", {}, "packed"),
    "gemma2": ("gemma2", "eager", {}, "packed"),
    "gpt_oss": ("gpt_oss", "eager", {}, "packed"),
    "mistral_sliding": ("mistral_sliding", "sdpa", {}, "packed"),
    "gpt2": ("gpt2", "sdpa", {}, "packed"),
    "opt": ("opt", "sdpa", {}, "packed"),
    "qwen3_moe": ("qwen3_moe", "sdpa", {}, "packed"),
    "deepseek_v3": ("deepseek_v3", "sdpa", {}, "packed"),
    "phi3": ("phi3", "sdpa", {}, "packed"),
    "phi3_longrope": (
        "phi3",
        "sdpa",
        {
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [4.0] * 6,
                "original_max_position_embeddings": 32,
            },
        },
        "single",
    ),
    "falcon": ("falcon", "sdpa", {}, "single"),
    "jamba": ("jamba", "sdpa", {}, "ragged"),
    "qwen3_next": ("qwen3_next", "sdpa", {}, "ragged"),
}


@functools.lru_cache(maxsize=2)
def model_of(name: str) -> PreTrainedModel:
    """A model, built once."""
    family, attention, settings, _ = MODELS[name]
    if name != "trained":
        return build_model(family, attention, **settings)
    model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def by_generate(name: str, prompt: tuple[int, ...], new: int = NEW) -> tuple[list[int], list[float]]:
    """Greedy tokens of `generate`, and by how much the score of each is above the next one."""
    out = model_of(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), gaps_of(out.scores)


def gaps_of(scores: Sequence[torch.Tensor]) -> list[float]:
    """By how much the best score is above the next one, as a part of how much all of them differ."""
    return [float(x[0].topk(2).values.diff().abs() / x[0][x[0].isfinite()].std()) for x in scores]


def same_as_generate(tokens: Sequence[int], expected: Sequence[int], scores: Sequence[torch.Tensor]) -> bool:
    """Whether these are the first tokens of `generate`, up to a choice between two that are equal but for rounding."""
    return _same(tokens, expected, gaps_of(scores))


def same(name: str, prompt: tuple[int, ...], tokens: list[int]) -> bool:
    """The same of a prompt."""
    return _same(tokens, *by_generate(name, prompt))


def _same(tokens: Sequence[int], expected: Sequence[int], gaps: Sequence[float]) -> bool:
    for got, right, gap in zip(tokens, expected, gaps, strict=False):
        if got != right:
            return gap < 1e-3
    return True


@functools.lru_cache(maxsize=1024)
def sampled_alone(name: str, prompt: tuple[int, ...], seed: int, new: int, count: int) -> list[list[int]]:
    """Tokens of a request that samples, in an engine of its own."""
    with torch.no_grad():
        engine = Engine(model_of(name), host_budget="64MiB")
        try:
            found = engine.generate_batch([list(prompt)], **sampling(seed, new, count))
        finally:
            engine.close()
    return [x.generated_tokens for x in found.values()]


def same_sampled(name: str, prompt: tuple[int, ...], seed: int, got: list[int], expected: list[int]) -> bool:
    """Whether these are the first tokens that are expected, up to one that only rounding decides."""
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
    if at is None:
        return len(got) <= len(expected)
    with torch.no_grad():
        scores = model_of(name)(torch.tensor([[*prompt, *got[:at]]])).logits[0, -1].float() / TEMPERATURE
    best = scores.topk(TOP_K + 1).values
    if best[-2] - best[-1] < 1e-4 * scores.std():
        return True  # which token is the last that may be drawn
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.rand((), generator=generator, dtype=torch.float64) for _ in range(at + 1)][-1]
    total = scores.masked_fill(scores < best[-2], -torch.inf).double().softmax(-1).cumsum(-1)
    return bool((total - drawn).abs().min() < 1e-5)


def sampling(seed: int, new: int, count: int) -> dict[str, Any]:
    """Options of a request that samples."""
    return {
        "do_sample": True,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "seed": seed,
        "max_new_tokens": new,
        "num_return_sequences": count,
    }


def stream_of_tokens(number: int) -> list[int]:
    """Long token streams, whose beginnings are prompts: so many requests share theirs."""
    return torch.randint(1, 120, (200,), generator=torch.Generator().manual_seed(number)).tolist()


def threads() -> set[threading.Thread]:
    """That run in this process; tqdm's own comes and goes with the bars of whoever loads a model."""
    return {each for each in threading.enumerate() if each.name != "tqdm_monitor"}


def handles() -> int:
    """Open files of this process."""
    return len(os.listdir(HANDLES)) if HANDLES.exists() else 0


@dataclass
class Asked:
    """A request of a load."""

    name: str
    prompt: tuple[int, ...]
    new: int
    conversation: str | None = None
    seed: int | None = None
    count: int = 1
    end: int | None = None
    cancelled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Load:
    """A random load. `play` runs it and checks every answer.

    Attributes:
        counts: of what came about, so that a test can see that it did.
    """

    name: str
    seed: int
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def play(self) -> None:
        """Run it."""
        self.random = random.Random(f"{self.name} {self.seed}")
        self.store: ConversationStore | None = None
        model_of(self.name)
        gc.collect()  # what other tests have dropped closes its handles now, and not in the midst of this
        before, files = threads(), handles()
        engine = self.engine()
        memory = engine.memory
        try:
            if engine.runner == "single":
                assert MODELS[self.name][3] == "single"
            if self.random.random() < 0.25:
                self.in_the_background(engine)
            else:
                self.step_by_step(engine)
            for each in self.asked:
                self.check(engine, each)
            self.check_conversation(engine)
            engine.check_integrity()
            self.nothing_is_left(engine)
        finally:
            engine.close()
            if self.store is not None:
                self.store.close()
        assert not memory.owners
        assert not any(slabs.budget.used for slabs in memory._tier_slabs())
        assert threads() <= before  # those of others may end meanwhile
        assert handles() == files

    def engine(self) -> Engine:
        """With random settings, and budgets down to the smallest."""
        r = self.random
        name = self.name
        kind = MODELS[name][3]
        size = r.choice((4, 8, 16, 16))
        self.asked: list[Asked] = []
        limit = 30 if kind != "packed" else 60
        edges = [x + d for x in (size, 2 * size, 16, WINDOW, 32) for d in (-1, 0, 1)]
        for i in range(r.randint(2, 7)):
            stream = stream_of_tokens(r.choice((1, 1, 2, 3)))
            start = r.choice((0, 0, 0, r.randint(0, 50)))
            length = max(1, min(limit, r.choice((r.choice(edges), r.randint(1, limit)))))
            prompt = tuple(stream[start : start + length])
            each = Asked(f"r{i}", prompt, r.randint(1, NEW))
            if r.random() < 0.25:
                each.seed, each.count = r.randint(0, 3), r.choice((1, 1, 2, 3))
                each.new = r.choice((3, 9))
            elif r.random() < 0.2:
                expected = by_generate(name, prompt)[0]
                each.end = r.choice(expected)
            self.asked.append(each)
        stored = r.random() < 0.4
        if stored:
            self.asked += self.turns(limit)
        options: dict[str, Any] = {
            "block_size": size,
            "max_batch_tokens": r.choice((1, 2, 5, 16, 17, 64, 2048)),
            "max_running": r.choice((1, 2, 4, 256)),
            "scheduler": r.choice(("fair", "fcfs")),
            "host_attention": r.random() < 0.85,
            "spill": r.random() < 0.6,
            "preemption": r.choice(("price", "swap", "recompute")),
        }
        if kind == "single":
            return self.made({"host_budget": "64MiB"}, options, stored=stored)
        budgets: dict[str, Any] = {"host_budget": "64MiB"}
        if r.random() < 0.75:
            one = self.bytes_of_a_block(options)
            most = max(-(-(len(x.prompt) + x.new) // size) for x in self.asked)
            most = max(most, -(-26 // size) + -(-11 // size))  # what the engine's own trial takes
            total = int(one * most * r.choice((1.0, 1.0, 1.2, 1.5, 3.0)))
            if r.random() < 0.5:
                device = max(int(total * r.choice((0.3, 0.6, 1.0))), one * 3)
                budgets = {"device_budget": device, "host_budget": max(total - device // 2, one * 2)}
            else:
                budgets = {"host_budget": total + one // 2}
            self.counts["budgeted"] += 1
        elif r.random() < 0.3:
            budgets["device_budget"] = "1MiB"
        for _ in range(12):
            try:
                return self.made(budgets, options | {"runner": kind}, stored=stored)
            except (BudgetError, kvtier.UnsupportedError) as error:
                if "udget" not in str(error):
                    raise
                self.counts["too small"] += 1
                budgets = {key: int(value * 1.3) for key, value in budgets.items()}
        raise AssertionError("no budget is enough")

    def turns(self, limit: int) -> list[Asked]:
        """The turns of a conversation, each of which begins with all that was said."""
        r, found = self.random, list[Asked]()
        prompt = stream_of_tokens(4)[: r.randint(1, limit // 3)]
        for i in range(r.randint(2, 3)):
            new = r.randint(1, min(NEW, limit // 3))
            found.append(Asked(f"turn{i}", tuple(prompt), new, conversation="alice"))
            prompt += by_generate(self.name, tuple(prompt))[0][:new]
            prompt += stream_of_tokens(5 + i)[: r.randint(1, 6)]
        return found

    def made(self, budgets: dict[str, Any], options: dict[str, Any], *, stored: bool) -> Engine:
        """An engine, on a store or with a memory of its own."""
        model = model_of(self.name)
        if not stored:
            return Engine(model, **budgets, **options)
        options = dict(options)
        own = {name: options.pop(name) for name in ("block_size", "host_attention")}
        self.store = ConversationStore(model, **budgets, **own)
        try:
            return Engine(model, store=self.store, **options)
        except BaseException:
            self.store.close()
            raise

    def bytes_of_a_block(self, options: dict[str, Any]) -> int:
        """Of all layers."""
        return _bytes_of_a_block(self.name, options["block_size"])

    def add(self, engine: Engine, each: Asked) -> None:
        """Add a request; one that never fits is refused at once."""
        options: dict[str, Any] = {"max_new_tokens": each.new, "request_id": each.name}
        options["conversation"] = each.conversation
        if each.seed is not None:
            options |= sampling(each.seed, each.new, each.count)
        elif each.end is not None:
            options["eos_token_id"] = each.end
        try:
            engine.add_request(list(each.prompt), priority=self.random.choice((0, 0, 0, 1)), **options)
        except BudgetError:
            each.options["refused"] = True
            self.counts["refused"] += 1

    def step_by_step(self, engine: Engine) -> None:
        """Requests come, and go, between steps."""
        r, coming = self.random, list(self.asked)
        idle = 0
        while coming or idle < 3:
            if coming and r.random() < 0.4:
                self.add(engine, coming.pop(0))
            idle = 0 if engine.step() or coming else idle + 1
            if r.random() < 0.2:
                engine.check_integrity()
            if r.random() < 0.04:
                self.cancel(engine)
            assert engine.steps < 4000, "it does not end"

    def in_the_background(self, engine: Engine) -> None:
        """Requests come while a thread runs steps."""
        engine.start()
        for each in self.asked:
            self.add(engine, each)
            if self.random.random() < 0.2:
                self.cancel(engine)
        for each in self.asked:
            if "refused" not in each.options:
                for name in self.names(each):
                    engine.wait(name, timeout=60)
        engine.stop()
        self.counts["threaded"] += 1

    @staticmethod
    def names(each: Asked) -> list[str]:
        return [each.name, *(f"{each.name}#{i}" for i in range(1, each.count))]

    def cancel(self, engine: Engine) -> None:
        """One of them."""
        each = self.random.choice(self.asked)
        engine.cancel(each.name)
        each.cancelled = True

    def check(self, engine: Engine, each: Asked) -> None:
        """What a request got."""
        if "refused" in each.options:
            return
        what = f"{self.name} seed {self.seed}: {each}"
        for i, name in enumerate(self.names(each)):
            output = engine.output(name)
            got = output.generated_tokens
            assert output.error is None, f"{what}: {output.error!r}"
            assert output.is_finished(), what
            self.counts["preempted"] += output.preempted
            self.counts["swapped"] += output.swapped
            self.counts["recomputed"] += output.preempted - output.swapped
            self.counts["cached"] += bool(output.cached_tokens)
            if output.finish_reason == "cancelled":
                assert each.cancelled, what
                self.counts["cancelled"] += 1
            elif each.end is None:
                assert (len(got), output.finish_reason) == (each.new, "length"), f"{what}: {got}"
            if each.seed is not None:
                expected = sampled_alone(self.name, each.prompt, each.seed, each.new, each.count)[i]
                assert same_sampled(self.name, each.prompt, each.seed + i, got, expected), f"{what}: {got} {expected}"
                self.counts["sampled"] += 1
            else:
                assert same(self.name, each.prompt, got), f"{what}: {got} {by_generate(self.name, each.prompt)}"
            if each.end is not None and each.end in got:
                assert got.index(each.end) == len(got) - 1, what
                if output.finish_reason != "cancelled":
                    assert output.finish_reason == "stop", what
        self.counts["requests"] += 1

    def check_conversation(self, engine: Engine) -> None:
        """Its history is that of the turn that ended last."""
        turns = [x for x in self.asked if x.conversation is not None and "refused" not in x.options]
        whole = [engine.output(x.name) for x in turns]
        whole = [x for x in whole if x.finish_reason == "length"]
        if self.store is None or not whole:
            return
        last = max(whole, key=lambda output: output.finished or 0.0)
        assert self.store.open("alice").ids == [*last.prompt_ids, *last.generated_tokens]
        self.counts["conversations"] += 1
        self.counts["later turns"] += sum(bool(output.cached_tokens) for output in whole[1:])

    def nothing_is_left(self, engine: Engine) -> None:
        """No block is held but by what is kept for later; without that, by nobody."""
        assert not engine._requests.running
        assert not engine._requests.waiting
        forward = getattr(engine._runner, "forward", None)
        if forward is None:
            assert not engine._runner._live  # type: ignore[attr-defined]
            return
        assert not forward.sequences
        if engine._prefixes is not None:
            engine._prefixes.clear()
        total, used, _ = forward.blocks()
        assert used == 0
        assert total > 0
        engine.check_integrity()
        for layer in forward._layers().values():
            assert not layer.tables
            assert not layer.blocks.runs


COUNTED = (
    "requests",
    "preempted",
    "swapped",
    "recomputed",
    "cancelled",
    "sampled",
    "cached",
    "conversations",
    "later turns",
    "refused",
    "threaded",
    "budgeted",
    "too small",
)


@functools.lru_cache(maxsize=256)
def _bytes_of_a_block(name: str, size: int) -> int:
    engine = Engine(model_of(name), host_budget="64MiB", block_size=size, runner=MODELS[name][3])
    try:
        return sum(x.layout.nbytes for x in engine._runner.forward._layers().values())  # type: ignore[attr-defined]
    finally:
        engine.close()
