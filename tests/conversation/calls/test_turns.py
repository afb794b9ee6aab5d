"""Whatever a call continues, its tokens are those of a new `DynamicCache`; what is re-used is what the rules say."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, dynamic_cache, tiny_model

from kvtier.conversation.calls import prefix_reuse
from kvtier.conversation.index import unpacked
from kvtier.conversation.kept import kept
from kvtier.conversation.store import ConversationStore
from kvtier.hf.models.identity.dependence import computed_as

#: Models whose layers keep all keys and values, and those with windows or recurrent states.
PLAIN = ("llama", "gpt2", "deepseek_v3", "falcon")
STATEFUL = ("gemma3", "qwen3_next", "jamba", "gpt_oss")
#: Those with an encoder.
ENCODED = ("t5", "bart")
#: Turns of one walk, and walks of each model; KVTIER_TEST_TURNS asks for more turns in all.
TURNS = 12
WALKS = max(1, int(os.environ.get("KVTIER_TEST_TURNS", "96")) // (TURNS * len(PLAIN + STATEFUL)))


@pytest.fixture(autouse=True)
def all_copies_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep those in the middle of a long sequence too: what is re-used is what a short rule says then."""
    for module in (kept, prefix_reuse):
        monkeypatch.setattr(module, "MOST_STATES", 10**6)


def fresh(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The oracle: the whole prompt in a new cache."""
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, past_key_values=dynamic_cache(model), **options)


class Kept:
    """Every sequence that was ever kept, for the rule of what is re-used: the longest common beginning, but for the
    prompt's last token. Of models with states: the longest one of which there is a copy, at the end of a prompt or of a
    turn; the latter is saved too.

    Attributes:
        copies, saved: beginnings of which there are copies of states, in memory and on the disk.
    """

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []
        self.copies: set[tuple[int, ...]] = set()
        self.saved: set[tuple[int, ...]] = set()

    def keep(self, prompt: list[int], sequence: list[int]) -> None:
        self.sequences.append(sequence)
        self.saved.add(tuple(sequence))
        self.copies |= {tuple(prompt[:-1]), tuple(sequence)}

    @staticmethod
    def last(copies: set[tuple[int, ...]], prompt: list[int]) -> int:
        """Tokens that precede the last of some copies that a prompt can go on from."""
        return max((len(x) for x in copies if len(x) < len(prompt) and tuple(prompt[: len(x)]) == x), default=0)

    def cached(self, prompt: list[int]) -> int:
        def alike(other: list[int]) -> int:
            n = 0
            while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
                n += 1
            return n

        return min(max(map(alike, self.sequences), default=0), len(prompt) - 1)


class Adapter(torch.nn.Module):
    """A module with a low-rank addition that can be switched, with the attributes of adapter libraries."""

    def __init__(self, base: torch.nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = base
        self.disable_adapters, self.merged, self.scaling = True, False, {"first": 1.0, "second": -2.0}
        self.active_adapters = ["first"]
        sides = sorted(base.weight.shape)  # type: ignore[arg-type]
        self.down = torch.randn(1, sides[-1], 1, generator=generator) / sides[-1] ** 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        scale = sum(self.scaling[name] for name in self.active_adapters)
        return out + scale * (x @ self.down[0, : x.shape[-1]])


def with_adapter(model: Any, generator: torch.Generator) -> tuple[Any, Adapter]:
    """A copy of a model with an adapter in its first layer, switched off."""
    model = copy.deepcopy(model)
    inside = [
        (name, module)
        for name, module in model.named_modules()
        if ".0." in name and getattr(module, "weight", torch.zeros(0)).dim() == 2
    ]
    name, module = inside[0]
    made = Adapter(module, generator).eval()
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made)
    return model, made


def walk(name: str, seed: int, device_budget: int | None = None, directory: Path | None = None) -> tuple[int, int]:
    """A chat that is extended, edited, shortened, generated again and forked: tokens of prompts, and re-used ones.

    With a directory, other things happen between the turns: the process ends and another one begins, what is kept is
    evicted or dropped, an adapter is switched.
    """
    rng = random.Random(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    model = tiny_model(name, "eager" if name == "gpt_oss" else "sdpa")
    adapter: Adapter | None = None
    if directory is not None:
        model, adapter = with_adapter(model, generator)
    plain, beams = name in PLAIN, seed % 2 == 1
    known: dict[Any, Kept] = {}
    histories: list[list[int]] = [torch.randint(1, VOCAB, (24,), generator=generator).tolist()]
    total = cached = 0

    def opened() -> ConversationStore:
        budgets: dict[str, Any] = {"device_budget": device_budget, "host_budget": "64MiB"}
        return ConversationStore(model, **budgets, block_size=8, directory=directory, loading="always")

    store = opened()
    try:
        for _ in range(TURNS):
            if adapter is not None:
                store = between(store, opened, adapter, rng, histories)
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
            elif adapter is not None and rng.random() < 0.3:
                options |= {"do_sample": True, "temperature": 0.7, "top_k": 5}
            drawn = rng.randrange(2**30)
            torch.manual_seed(drawn)
            out = store.generate(ids, attention_mask=torch.ones_like(ids), **options)
            torch.manual_seed(drawn)
            assert torch.equal(out, fresh(model, ids, **options)), (how, mode)
            for row, prompt in zip(store.reuse, rows, strict=True):
                assert row.prompt == len(prompt) == row.cached + row.computed
            mine = known.setdefault(computed_as(model), Kept())
            if plain and not beams:
                assert [row.cached for row in store.reuse] == [min(map(mine.cached, rows))] * batch
            elif not beams:
                most = mine.last(mine.copies, history)
                least = most if adapter is None else mine.last(mine.saved, history)
                assert least <= store.reuse[0].cached <= most
            for prompt, row in zip(rows, out.tolist(), strict=False):
                mine.keep(prompt, row[:-1])
            mine.sequences += [row[:-1] for row in out.tolist()[len(rows) :]]
            total += sum(map(len, rows))
            cached += sum(row.cached for row in store.reuse)
            histories += out.tolist()
            store.check_integrity()
        if adapter is None:
            check_kept(store, model)
        assert store.stats.problem == ""
    finally:
        store.close()
    return total, cached


def between(
    store: ConversationStore,
    opened: Callable[[], ConversationStore],
    adapter: Adapter,
    rng: random.Random,
    histories: list[list[int]],
) -> ConversationStore:
    """Something may happen between two turns. Nothing of it may change what is re-used: what is not here is saved."""
    events = (
        "nothing",
        "restart",
        "park",
        "drop",
        "gap",
        "squeeze",
        "adapter",
        "pin",
        "unpin",
        "expire",
        "wake",
        "wake",
    )
    what = rng.choice(events)
    if what == "restart":
        store.close()
        return opened()
    if what == "park":
        store.park(rng.choice(histories))
    elif what == "drop":
        store.flush()
        store.clear()
    elif what == "gap":
        store.flush()
        history = rng.choice(histories)
        start = rng.randrange(len(history))
        store.drop(history, start, rng.randint(start + 1, len(history)))
    elif what == "squeeze":
        store.flush()
        squeeze(store, rng)
    elif what in ("pin", "unpin"):
        chat = store.open(rng.choice("ab"))
        chat.ids = rng.choice(histories)
        chat.set_rank(pinned=what == "pin", priority=rng.randrange(-1, 2))
    elif what == "expire":
        chat = store.open("c", ttl=1e-9)  # in memory only: what the disk gives up would be computed again
        store.flush()
        squeeze(store, rng)
        chat.ttl, chat.ids = math.inf, rng.choice(histories)
    elif what == "wake":
        for _ in range(rng.randint(1, 3)):
            wake = store.wake(rng.choice(histories))
            if rng.random() < 0.3:
                wake.wait()
            elif rng.random() < 0.3:
                wake.cancel()
    elif what == "adapter":
        adapter.disable_adapters = rng.random() < 0.4
        adapter.active_adapters = [rng.choice(("first", "second"))]
    return store


def squeeze(store: ConversationStore, rng: random.Random) -> None:
    """Others need room; what is pinned stays."""
    ranks = store._kept.ranks
    with store.memory.lock:
        ranks.refresh()
        pinned = {name: ranks._ranked[name].tokens for name in ranks.pinned}
        store._kept.parked.give(rng.randrange(1, 20_000))
        ranks.refresh()
        for name, tokens in pinned.items():
            assert ranks._ranked[name].tokens == tokens, "what is pinned was given up"


def check_kept(store: ConversationStore, model: Any) -> None:
    """Whoever continues what is kept gets the tokens of a new cache, whoever that is."""
    for ids in [unpacked(entry.ids) for entry in store._kept.entries.values()]:
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


@pytest.mark.parametrize("seed", range(max(WALKS // 2, 1)))
@pytest.mark.parametrize("name", PLAIN + STATEFUL)
def test_restarts_evictions_and_adapters_change_no_token_and_nothing_that_is_re_used(
    name: str, seed: int, tmp_path: Path
) -> None:
    _, cached = walk(name, 1000 + seed, 60_000 if seed % 2 else None, tmp_path)
    assert cached > 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", *STATEFUL])
def test_where_the_tail_alone_has_changed_most_is_re_used(name: str) -> None:
    """Another last question, another answer, a turn less: of twenty turns, 95% are there, with states too."""
    model = tiny_model(name, "eager" if name == "gpt_oss" else "sdpa")
    draw = torch.Generator("cpu").manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    ends, history = list[int](), torch.zeros(1, 0, dtype=torch.long)
    with ConversationStore(model, host_budget="64MiB", block_size=8) as store:

        def ask(ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = store.generate(ids, attention_mask=torch.ones_like(ids), **options)
            return out

        for _ in range(22):
            ends.append(history.shape[1])
            history = ask(torch.cat([history, torch.randint(1, VOCAB, (1, 8), generator=draw)], 1))
        before, question = history[:, : ends[-1]], torch.randint(1, VOCAB, (1, 8), generator=draw)
        tails = {
            "another question": torch.cat([before, question], 1),
            "another answer": history[:, : ends[-1] + 8],
            "a turn less": torch.cat([history[:, : ends[-2]], question], 1),
            "the next one": torch.cat([history, question], 1),
        }
        for what, ids in tails.items():
            out = ask(ids)
            assert store.reuse[0].cached >= 0.95 * (ids.shape[1] - 8), what
            assert torch.equal(out, fresh(model, ids, **options)), what


def encoded_walk(name: str, seed: int) -> None:
    """A text that an encoder-decoder answers to: extended, edited, asked again, by several tenants, with adapters that
    are switched. What the encoder gave is used again where all that it depends on is the same."""
    rng, generator = random.Random(seed), torch.Generator("cpu").manual_seed(seed)
    model, adapter = with_adapter(tiny_model(name), generator)
    before: set[Any] = set()
    texts = [torch.randint(1, VOCAB, (12,), generator=generator).tolist()]
    with ConversationStore(model, host_budget="64MiB") as store:
        for _ in range(TURNS):
            if rng.random() < 0.2:
                adapter.disable_adapters = rng.random() < 0.4
                adapter.active_adapters = [rng.choice(("first", "second"))]
            if rng.random() < 0.05:
                store.clear()
                before.clear()
            text, how = list(rng.choice(texts)), rng.choice(("again", "again", "extend", "edit", "shorten"))
            new = torch.randint(1, VOCAB, (rng.randint(1, 6),), generator=generator).tolist()
            if how == "extend":
                text += new
            elif how == "edit":
                at = rng.randrange(len(text))
                text[at : at + 1] = new
            elif how == "shorten":
                text = text[: rng.randint(1, len(text))]
            texts.append(text)
            rows = [text] * rng.choice((1, 1, 2))
            ids, salt = torch.tensor(rows), rng.choice((None, None, "a"))
            ways: tuple[dict[str, Any], ...] = ({}, {}, {"num_beams": 3}, {"do_sample": True, "top_k": 5})
            options = {"max_new_tokens": rng.randint(1, 8), "do_sample": False} | rng.choice(ways)
            drawn = rng.randrange(2**30)
            torch.manual_seed(drawn)
            out = store.generate(ids, attention_mask=torch.ones_like(ids), salt=salt, **options)
            torch.manual_seed(drawn)
            assert torch.equal(out, fresh(model, ids, **options)), how
            inputs = computed_as(model), salt, len(rows), tuple(text)
            assert [row.cached for row in store.reuse] == [len(text) if inputs in before else 0] * len(rows)
            before.add(inputs)


@pytest.mark.parametrize("seed", range(2 * WALKS))
@pytest.mark.parametrize("name", ENCODED)
def test_an_encoder_decoder_has_the_tokens_of_a_new_cache(name: str, seed: int) -> None:
    encoded_walk(name, seed)
