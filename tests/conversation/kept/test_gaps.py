"""Tokens in the middle of a history that are not kept any more: they are computed again, and no others."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from families import VOCAB, tiny_model
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import ConfigError, CorruptionError
from kvtier.conversation.calls import columns
from kvtier.conversation.calls.columns import LEAST_BEHIND
from kvtier.conversation.calls.prefix_reuse import PrefixReuse

#: Tokens of a block in `store_of`.
BLOCK = 8
SEED = int(os.environ.get("KVTIER_TEST_SEED", "0"))
WALKS = max(1, int(os.environ.get("KVTIER_TEST_TURNS", "96")) // 48)


def up(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


class Pieces:
    """The oracle: of one history, which tokens are kept, and what is computed when it goes on."""

    def __init__(self, length: int) -> None:
        self.kept = [True] * length

    def drop(self, start: int, stop: int) -> None:
        """What follows in the same block goes too."""
        for begin, end in self.pieces():
            if max(start, begin) < min(stop, end):
                for i in range(max(start, begin), min(up(stop), end)):
                    self.kept[i] = False

    def pieces(self) -> list[tuple[int, int]]:
        edges = [i for i in range(len(self.kept) + 1) if [*self.kept, False][i] != [False, *self.kept][i]]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def cached(self, prompt: int) -> int:
        """Tokens that are re-used of a prompt that goes on with the history."""
        total = 0
        for begin, end in self.pieces():
            tokens = min(end, prompt - 1) - begin
            if not begin or tokens >= LEAST_BEHIND:
                total += max(tokens, 0)
        return total


@pytest.mark.parametrize("device_budget", [None, "64KiB"], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "falcon"])
@pytest.mark.parametrize("seed", range(WALKS))
def test_only_what_is_missing_is_computed(name: str, device_budget: str | None, seed: int) -> None:
    model, draw = tiny_model(name), random.Random(1000 * SEED + seed)
    with store_of(model, device_budget=device_budget) as store:
        history = store.generate(**ones(some_ids(draw.randrange(60, 150), seed=seed)), **GREEDY)
        for turn in range(4):
            pieces = Pieces(history.shape[1] - 1)
            for _ in range(draw.randrange(3)):
                start = draw.randrange(history.shape[1] - 1)
                stop = draw.randrange(start + 1, history.shape[1])
                store.drop(history[0].tolist(), start, stop)
                pieces.drop(start, stop)
                store.check_integrity()
            inputs = ones(grown(history, draw.randrange(1, 6), seed=turn))
            options = draw.choice(({}, {}, {"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}))
            out = store.generate(**inputs, **GREEDY, **options)
            assert torch.equal(out, fresh(model, inputs, **options)), (seed, turn)
            prompt = inputs["input_ids"].shape[1]
            assert store.reuse[0].cached == pieces.cached(prompt), (seed, turn)
            assert store.reuse[0].computed == prompt - store.reuse[0].cached
            store.check_integrity()
            history = out[:1]
            if options:  # several sequences have the same beginning
                store.clear()
                history = store.generate(**ones(history), **GREEDY)
        assert store.stats.problem == ""
        assert store.memory.stats.host.bytes > 0
        store.clear()
        store.check_integrity()
        assert store.stats.sequences == 0


@pytest.mark.parametrize("start", [0, 1, 8, 13, 16])
@pytest.mark.parametrize("tokens", [1, 8, 21])
def test_at_every_edge_of_a_block(start: int, tokens: int) -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(90)), **GREEDY)
        store.drop(history[0].tolist(), start, start + tokens)
        inputs = ones(grown(history))
        out = store.generate(**inputs, **GREEDY)
        assert torch.equal(out, fresh(model, inputs))
        missing = up(start + tokens) - start
        assert store.reuse[0].cached == 95 - missing
        assert store.stats.sequences == 1, "the whole history takes the place of its pieces"
        store.check_integrity()


def test_blocks_that_are_dropped_take_no_room_and_those_of_a_fork_stay() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        fork = grown(history[:, :120], 10, seed=5)
        other = store.generate(**ones(fork), **GREEDY)
        before = store.memory.stats.host.bytes
        store.drop(history[0].tolist(), 40, 80)
        assert store.memory.stats.host.bytes == before, "the fork has them"
        inputs = ones(grown(other))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].cached == other.shape[1] - 1
        store.check_integrity()


def test_an_edited_history_uses_what_is_behind_a_gap_only_as_far_as_it_is_the_same() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        store.drop(history[0].tolist(), 40, 80)
        edited = history.clone()
        edited[0, 110] = edited[0, 110] % (VOCAB - 1) + 1
        out = store.generate(**ones(edited), **GREEDY)
        assert torch.equal(out, fresh(model, ones(edited)))
        assert store.reuse[0].cached == 110 - 40
        before = history.clone()
        before[0, 60] = before[0, 60] % (VOCAB - 1) + 1  # what is behind the gap is of other tokens
        assert torch.equal(store.generate(**ones(before), **GREEDY), fresh(model, ones(before)))
        assert store.reuse[0].cached == 60, "of the edited history, as far as it is the same"
        store.check_integrity()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_where_states_are_needed_what_follows_goes_too(name: str) -> None:
    model = tiny_model(name)
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(40)), **GREEDY)
        history = store.generate(**ones(grown(history, 30)), **GREEDY)
        store.drop(history[0].tolist(), 60, 70)
        inputs = ones(grown(history))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert 0 < store.reuse[0].cached <= 60
        store.check_integrity()


def test_a_conversation_drops_and_says_which_positions_it_has() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        chat = store.open("a", salt="one")
        out = chat.generate(**ones(some_ids(100)), **GREEDY)
        chat.drop(20, 60)
        inputs = ones(grown(out))
        assert torch.equal(chat.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].cached == out.shape[1] - 1 - (64 - 20)
        for start, stop in ((-1, 3), (3, 3), (5, 4), (0, 10_000)):
            with pytest.raises(ConfigError, match="the sequence has"):
                chat.drop(start, stop)
        store.drop(some_ids(10)[0].tolist(), 0, 10)  # nothing of it is kept
        chat.drop(20, 60)
        assert store.verify(sequences=9) == 20, "what is behind a gap cannot be compared by itself"


def test_what_is_dropped_in_between_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is needed while the gap is computed: what is behind it goes, and the tokens are right."""
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(100)), **GREEDY)
        store.drop(history[0].tolist(), 20, 60)
        inputs, real = ones(grown(history)), PrefixReuse._forward

        def forward(*args: Any) -> None:
            real(*args)
            for entry in [x for x in store._kept.entries.values() if x.sequence.start]:
                store._kept.parked.drop(entry.sequence)

        monkeypatch.setattr(PrefixReuse, "_forward", forward)
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].cached == 20
        store.check_integrity()


def test_little_behind_a_gap_is_not_worth_a_forward() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(60)), **GREEDY)
        store.drop(history[0].tolist(), 10, 45)
        inputs = ones(grown(history))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert history.shape[1] - 1 - 48 >= LEAST_BEHIND == columns.LEAST_BEHIND
        assert store.reuse[0].cached == 10 + history.shape[1] - 1 - 48


def test_what_is_behind_a_gap_is_used_where_another_sequence_has_what_is_missing() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        other = store.generate(**ones(grown(history[:, :120], 30, seed=5)), **GREEDY)
        store.drop(history[0].tolist(), 20, 30)
        for mine in (history, other):
            inputs = ones(grown(mine))
            out = store.generate(**inputs, **GREEDY)
            assert torch.equal(out, fresh(model, inputs))
            assert store.reuse[0].cached == mine.shape[1] - 1, "nothing that is kept is computed"
            store.check_integrity()


def test_sequences_that_part_behind_the_same_gap_go_on_with_their_own() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        begin = some_ids(40)
        all_of_them = [store.generate(**ones(grown(begin, 60 - 10 * i, seed=i)), **GREEDY) for i in range(3)]
        for _ in all_of_them:  # each time another one has the tokens
            store.drop(begin[0].tolist(), 8, 16)
        for history in all_of_them:
            inputs = ones(grown(history))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            missing = 8 if history is all_of_them[0] else 0
            assert store.reuse[0].cached == history.shape[1] - 1 - missing
            store.check_integrity()


def test_what_is_behind_a_gap_is_used_where_a_fork_has_the_tokens_of_the_gap() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        store.generate(**ones(grown(history[:, :100], 10, seed=5)), **GREEDY)
        store.drop(history[0].tolist(), 20, 40)
        inputs = ones(grown(history))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert (store.reuse[0].cached, store.reuse[0].computed) == (160, 5), "the fork's, and then its own"
        store.check_integrity()


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_pieces_behind_one_gap_the_one_that_has_most_is_used(first: int) -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        fork = store.generate(**ones(grown(history[:, :100], 30, seed=5)), **GREEDY)
        both = [history, fork]
        for each in both[first:] + both[:first]:
            store.drop(each[0].tolist(), 20, 40)
        for each in both:
            inputs = ones(grown(each))
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            assert store.reuse[0].computed <= 20 + 5
            store.check_integrity()


def test_damage_that_is_found_while_a_gap_is_computed_is_an_error_and_then_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    with store_of(model, audit="full") as store:
        history = store.generate(**ones(some_ids(100)), **GREEDY)
        store.drop(history[0].tolist(), 20, 60)
        inputs, real = ones(grown(history)), PrefixReuse._forward

        def forward(*args: Any) -> None:
            entry = next(x for x in store._kept.entries.values() if not x.sequence.start)
            run = entry.sequence.tables[1].resolve()[0]
            run.blocks.pools.host.bytes(run.host, 1).view(torch.uint8)[..., 3] ^= 1
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(PrefixReuse, "_forward", forward)
            with pytest.raises(CorruptionError):
                store.generate(**inputs, **GREEDY)
        store.check_integrity()
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        store.check_integrity()


@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("tiers", [1, 2])
def test_damage_of_one_piece_leaves_those_before_and_behind(damaged: int, tiers: int) -> None:
    model, budgets = tiny_model("llama"), {"device_budget": "256KiB"}
    with store_of(model, audit="full", **(budgets if tiers == 2 else {})) as store:
        history = store.generate(**ones(some_ids(155)), **GREEDY)
        for start, stop in ((40, 48), (96, 104)):
            store.drop(history[0].tolist(), start, stop)
        store.park(history[0].tolist())
        pieces = sorted(store._kept.parked.sequences, key=lambda x: x.start)
        assert [(x.start, x.start + x.length) for x in pieces] == [(0, 40), (48, 96), (104, 160)]
        run = pieces[damaged].tables[0].resolve()[0]
        run.blocks.pools.host.bytes(run.host, 1)[3] ^= 1
        inputs = ones(grown(history))
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert store.reuse[0].cached == (40 + 48 + 56) - (40, 48, 56)[damaged]
        assert store.reuse[0].why == ""
        store.check_integrity()
