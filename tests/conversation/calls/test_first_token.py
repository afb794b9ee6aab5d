"""A conversation that was parked on the host goes on where it is: its history needs no device room, and is not fetched,
before the first token; then what there is room for comes to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_model
from test_ranks import turn
from test_store import GREEDY, fresh, ones, some_ids, store_of
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtier.memory.blocks.block import State

#: Bytes of a block of 8 tokens of one layer of the model.
BLOCK = 1536


class Watches(StoppingCriteria):
    """Notes what was copied to the device when each token was chosen."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.bytes_up: list[int] = []
        self.host_attended: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        stats = self.store.memory.stats
        self.bytes_up.append(stats.bytes_up)
        self.host_attended.append(stats.host_attended)
        return torch.zeros(len(ids), dtype=torch.bool)


def resumed(store: Any, chat: Any, ids: torch.Tensor, **options: Any) -> Watches:
    """A turn of a parked conversation, with what was copied and attended since it began."""
    chat.park()
    watches, before = Watches(store), store.memory.stats
    with store.memory.lock:
        for entry in store._kept.entries.values():
            for table in entry.sequence.tables.values():
                assert all(run.state is State.HOST for run in table.resolve()), "it is on the host only"
    given = GREEDY | options
    out = chat.generate(**ones(ids), **given, stopping_criteria=StoppingCriteriaList([watches]))
    assert torch.equal(out, fresh(store.model, ones(ids), **options))
    watches.bytes_up = [x - before.bytes_up for x in watches.bytes_up]
    watches.host_attended = [x - before.host_attended for x in watches.host_attended]
    return watches


@pytest.mark.parametrize("policy", [None, "adaptive"])
@pytest.mark.parametrize("behind", [0, 3])
def test_the_first_token_comes_without_that_the_history_is_fetched(behind: int, policy: str | None) -> None:
    model = tiny_model("llama")
    layers = model.config.num_hidden_layers
    with store_of(model, device_budget=16 * BLOCK, host_budget="4MiB", policy=policy) as store:
        chat = store.open("a")  # of ten times as many blocks as the device has
        out = turn(chat, some_ids(400 + 3 + behind))  # 6 tokens of an answer, of which the last is not kept
        assert chat.ids[:-1] == out[0, :-1].tolist()
        ids = torch.cat([out, some_ids(3, seed=7)], 1)
        watches = resumed(store, chat, ids)
        assert chat.reuse is not None
        assert chat.reuse.cached == 408 + behind
        # A block that the turn goes on to fill is copied, for what is parked is never written; it alone is fetched.
        assert watches.bytes_up[0] == (layers * BLOCK if behind else 0)
        assert watches.host_attended[0] == layers, "host threads have read the rest where it is"
        store.check_integrity()


@pytest.mark.parametrize("policy", [None, "adaptive"])
def test_behind_the_first_token_blocks_come_to_the_device_that_there_is_room_for(policy: str | None) -> None:
    model = tiny_model("llama")
    with store_of(model, device_budget=600 * BLOCK, host_budget="4MiB", policy=policy) as store:
        chat = store.open("a")
        out = turn(chat, some_ids(403))
        watches = resumed(store, chat, torch.cat([out, some_ids(3, seed=7)], 1), max_new_tokens=24)
        assert watches.host_attended[0] > 0
        assert watches.bytes_up[0] == 0
        assert watches.bytes_up[-1] >= 51 * model.config.num_hidden_layers * BLOCK, "it is promoted while it decodes"
        store.check_integrity()


def test_without_host_attention_the_history_is_fetched() -> None:
    model = tiny_model("llama")
    with store_of(model, device_budget=240 * BLOCK, host_budget="4MiB", host_attention=False) as store:
        chat = store.open("a")
        out = turn(chat, some_ids(403))
        watches = resumed(store, chat, torch.cat([out, some_ids(3, seed=7)], 1))
        assert watches.bytes_up[0] >= 51 * model.config.num_hidden_layers * BLOCK
        assert watches.host_attended[-1] == 0
