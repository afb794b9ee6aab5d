"""Whatever a call continues, its tokens are those of a new `DynamicCache`; what is re-used is what the rules say."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from families import VOCAB, dynamic_cache, tiny_model

from kvtier.conversation.index import unpacked
from kvtier.conversation.store import ConversationStore

#: Models whose layers keep all keys and values, and those with windows or recurrent states.
PLAIN = ("llama", "gpt2", "deepseek_v3", "falcon")
STATEFUL = ("gemma3", "qwen3_next", "jamba", "gpt_oss")
#: Turns of one walk, and walks of each model; KVTIER_TEST_TURNS asks for more turns in all.
TURNS = 12
WALKS = max(1, int(os.environ.get("KVTIER_TEST_TURNS", "192")) // (TURNS * len(PLAIN + STATEFUL)))


def fresh(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The oracle: the whole prompt in a new cache."""
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, past_key_values=dynamic_cache(model), **options)


class Kept:
    """Every sequence that was ever kept, for the rule of what is re-used: the longest common beginning, but for the
    prompt's last token."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def cached(self, prompt: list[int]) -> int:
        def alike(other: list[int]) -> int:
            n = 0
            while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
                n += 1
            return n

        return min(max(map(alike, self.sequences), default=0), len(prompt) - 1)


def walk(name: str, seed: int, device_budget: int | None = None) -> tuple[int, int]:
    """A chat that is extended, edited, shortened, generated again and forked: tokens of prompts, and re-used ones."""
    rng = random.Random(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    model = tiny_model(name, "eager" if name == "gpt_oss" else "sdpa")
    plain, kept, beams = name in PLAIN, Kept(), seed % 2 == 1
    histories: list[list[int]] = [torch.randint(1, VOCAB, (24,), generator=generator).tolist()]
    total = cached = 0
    with ConversationStore(model, device_budget=device_budget, host_budget="64MiB", block_size=8) as store:
        for _ in range(TURNS):
            history = list(rng.choice(histories))
            new = torch.randint(1, VOCAB, (rng.randint(1, 12),), generator=generator).tolist()
            how = rng.choice(("extend", "extend", "extend", "edit", "shorten", "again", "other"))
            if how == "extend":
                history += new
            elif how == "edit":
                at = rng.randrange(len(history))
                history[at : at + 1] = new
            elif how == "shorten":
                history = history[: rng.randint(1, len(history))]
            elif how == "other":
                history = new
            batch = rng.choice((1, 1, 1, 2)) if plain else 1
            rows = [history] + [[*history[:-1], rng.randint(1, VOCAB - 1)] for _ in range(batch - 1)]
            ids = torch.tensor(rows)
            options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 10), "do_sample": False}
            mode = rng.choice(("greedy", "greedy", "greedy", "beams", "several")) if beams else "greedy"
            if mode == "beams":
                options["num_beams"] = 3
            elif mode == "several":
                options |= {"num_return_sequences": 2, "num_beams": 2}
            out = store.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert torch.equal(out, fresh(model, ids, **options)), (how, mode)
            for row, prompt in zip(store.reuse, rows, strict=True):
                assert row.prompt == len(prompt) == row.cached + row.computed
            if plain and not beams:
                assert [row.cached for row in store.reuse] == [min(map(kept.cached, rows))] * batch
            kept.sequences += [row[:-1] for row in out.tolist()]
            total += sum(map(len, rows))
            cached += sum(row.cached for row in store.reuse)
            histories += out.tolist()
            store.check_integrity()
        check_kept(store, model)
    return total, cached


def check_kept(store: ConversationStore, model: Any) -> None:
    """Whoever continues what is kept gets the tokens of a new cache, whoever that is."""
    for ids in [unpacked(entry.ids) for entry in store._entries.values()]:
        prompt = torch.tensor([[*ids, 5]])
        options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
        out = store.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(out, fresh(model, prompt, **options))
        assert store.reuse[0].cached


@pytest.mark.parametrize("seed", range(WALKS))
@pytest.mark.parametrize("device_budget", [None, 60_000], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("name", PLAIN + STATEFUL)
def test_every_turn_has_the_tokens_of_a_new_cache(name: str, device_budget: int | None, seed: int) -> None:
    _, cached = walk(name, seed, device_budget)
    assert cached > 0
