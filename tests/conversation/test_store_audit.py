"""Damaged blocks of kept conversations: computed again, or an error; never a wrong token."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from families import build_model, tiny_model
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import ConversationStore, CorruptionError
from kvtier.memory.blocks.block import Run, State

#: Damages of each model.
DAMAGES = int(os.environ.get("KVTIER_TEST_DAMAGES", "160")) // 80
SEED = int(os.environ.get("KVTIER_TEST_SEED", "0"))


def kept_runs(store: ConversationStore) -> list[Run]:
    """Of parked sequences, what is in host memory."""
    store.memory._drain()
    valid = (State.HOST, State.BOTH)
    runs = [x for s in store._kept.parked.sequences for table in s.tables.values() for x in table.resolve()]
    return [run for run in dict.fromkeys(runs) if run.state in valid and run.sums is not None]


def damage(store: ConversationStore, draw: random.Random) -> bool:
    runs = kept_runs(store)
    if not runs:
        return False
    run = draw.choice(runs)
    assert run.host is not None
    data = run.blocks.pools.host.bytes(run.host + draw.randrange(run.count), 1)
    if draw.random() < 0.2:  # tables of two layers, or of two sequences
        sequences = list(store._kept.parked.sequences)
        one, two = draw.choice(sequences), draw.choice(sequences)
        a, b = draw.choice(list(one.tables)), draw.choice(list(two.tables))
        if one.tables[a] is two.tables[b] or one.tables[a].resolve() == two.tables[b].resolve():
            return False
        one.tables[a].runs, two.tables[b].runs = two.tables[b].runs, one.tables[a].runs
        return True
    if draw.random() < 0.5:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        data[draw.randrange(len(data) // 2) :] = draw.randrange(256)
    return True


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("tiers", [1, 2])
def test_under_a_full_audit_damaged_conversations_give_the_right_tokens_or_an_error(name: str, tiers: int) -> None:
    model, errors, dropped = tiny_model(name), 0, 0
    draw = random.Random(SEED)
    for n in range(max(DAMAGES, 1)):
        budgets: dict[str, Any] = {} if tiers == 1 else {"device_budget": "256KiB"}
        store = store_of(model, audit="full", **budgets)
        chats = [some_ids(draw.randrange(10, 60), seed=SEED + 10 * n + i) for i in range(2)]
        for turn in range(4):
            i = draw.randrange(2)
            inputs = ones(grown(chats[i], draw.randrange(1, 5), seed=turn))
            expected = fresh(model, inputs)
            damaged = turn > 1 and damage(store, draw)
            try:
                out = store.generate(**inputs, **GREEDY)
            except CorruptionError:
                assert damaged
                errors += 1
                out = store.generate(**inputs, **GREEDY)  # it is computed again
            assert torch.equal(out, expected), (SEED, n, turn)
            dropped += store.reuse[0].why == "what was kept does not hold what was written"
            chats[i] = out
            if tiers == 2:
                store.park(out[0].tolist())
        # Not closed: tables that were swapped are no sequence's any more.
    assert DAMAGES < 8 or dropped + errors > 0


def test_what_is_damaged_is_dropped_and_said() -> None:
    model = tiny_model("llama")
    with store_of(model, audit="full") as store:
        ids = some_ids(40)
        out = store.generate(**ones(ids), **GREEDY)
        run = kept_runs(store)[0]
        assert run.host is not None
        run.blocks.pools.host.bytes(run.host, 1)[9] ^= 1
        more = grown(out)
        again = store.generate(**ones(more), **GREEDY)
        assert torch.equal(again, fresh(model, ones(more)))
        assert store.reuse[0].cached == 0
        assert store.reuse[0].why == "what was kept does not hold what was written"
        assert "does not hold the bytes" in store.stats.problem
        assert store.generate(**ones(grown(again)), **GREEDY) is not None
        assert store.reuse[0].cached > 40
        store.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
def test_keys_and_values_that_are_kept_are_those_of_their_tokens(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        assert store.verify() == 0
        ids = some_ids(40)
        for _ in range(3):
            ids = grown(store.generate(**ones(ids), **GREEDY))
        store.generate(**ones(some_ids(30, seed=4)), **GREEDY)
        assert store.verify(sequences=9) > 90
        store.check_integrity()


@pytest.mark.parametrize("what", ["ids", "values"])
def test_what_is_kept_of_other_tokens_is_noticed_and_dropped(what: str) -> None:
    model = build_model("llama", "sdpa")
    with store_of(model) as store:
        store.generate(**ones(some_ids(40)), **GREEDY)
        (entry,) = store._kept.entries.values()
        if what == "ids":
            entry.ids = entry.ids[:8] + entry.ids[16:24] + entry.ids[16:]
        else:  # keys and values that were computed wrongly, with a checksum of the wrong ones
            with torch.no_grad():
                next(model.parameters()).data.mul_(1.01)
        with pytest.raises(CorruptionError, match="of their norm"):
            store.verify()
        assert store.stats.sequences == 0
