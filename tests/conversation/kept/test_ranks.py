"""What is pinned stays, what has a lower priority or was not used for long goes first, and tokens are right."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import disk_of, held_writes, load, save
from families import tiny_model
from test_ranked import of_layout_5
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import BudgetError, ConfigError, ConversationStore, TieredKVCache, TieredMemory
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.index import packed
from kvtier.conversation.kept import retention
from kvtier.conversation.kept.kept import MOST_STATES
from kvtier.conversation.names import Conversations
from kvtier.eviction.rank import Rank
from kvtier.hf.models.identity import fingerprint

#: Host memory that holds two or three conversations of five.
BUDGETS = {"llama": "56KiB", "gemma3": "40KiB", "qwen3_next": "40KiB"}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "TOKENS", 8)


def turn(chat: Conversation, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    out: torch.Tensor = chat.generate(**ones(ids), **(GREEDY | options))
    assert torch.equal(out, fresh(chat.store.model, ones(ids), **options))
    return out


@functools.lru_cache(maxsize=64)
def of_stranger(model: Any, tokens: int, seed: int) -> torch.Tensor:
    """What one of a crowd is answered. The same strangers come again and again, to the same models."""
    return fresh(model, ones(some_ids(tokens, seed=seed)))


def crowd(store: ConversationStore, count: int = 8, tokens: int = 24) -> None:
    """Others come, until what is kept has gone."""
    for i in range(count):
        ids = some_ids(tokens, seed=1000 + i)
        assert torch.equal(store.generate(**ones(ids), **GREEDY), of_stranger(store.model, tokens, 1000 + i))
    store.check_integrity()


@pytest.mark.parametrize("device_budget", [None, 60_000], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_what_is_pinned_is_there_however_many_come(name: str, policy: str, device_budget: int | None) -> None:
    model = tiny_model(name)
    with store_of(model, eviction=policy, host_budget=BUDGETS[name], device_budget=device_budget) as store:
        chat = store.open("a", pinned=True)
        ids = some_ids(20)
        for _ in range(2):
            out = turn(chat, ids)
            crowd(store, 12 if device_budget else 8)
            ids = grown(out)
        assert store.stats.dropped
        turn(chat, ids)
        assert chat.reuse is not None
        assert chat.reuse.cached == ids.shape[1] - 5
        chat.pinned = False
        if policy == "lru":
            crowd(store, 16)
            turn(chat, grown(out))
            assert chat.reuse.cached < 20, "it is given up as others are"


def test_a_call_that_pins_leave_no_room_for_is_refused_and_says_who_is_pinned() -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="40KiB") as store:
        chats = [store.open(f"chat {i}", pinned=True) for i in range(2)]
        for i, chat in enumerate(chats):
            turn(chat, some_ids(16, seed=i))
        inputs = ones(some_ids(48, seed=9))
        with pytest.raises(BudgetError, match="'chat 0', 'chat 1'") as caught:
            store.generate(**inputs, **GREEDY)
        assert caught.value.pinned == ("chat 0", "chat 1")
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.pinned, again.needed) == (caught.value.pinned, caught.value.needed)
        store.check_integrity()
        for chat in chats:
            assert len(chat.ids) == 22
        chats[0].pinned = False
        needed = caught.value.needed
        chats[0].pinned = True
        store.memory.resize(host_budget=needed)
        one = store.generate(**inputs, **(GREEDY | {"max_new_tokens": 1}))
        assert torch.equal(one, fresh(model, inputs, max_new_tokens=1)), "what was said to be needed is enough"
        for i, chat in enumerate(chats):
            found = store._kept.ranks._ranked[chat.name]
            assert found.tokens == 21, i
        for chat in chats:
            chat.pinned = False
        store.memory.resize(host_budget="40KiB")
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))


def test_what_caches_were_promised_cannot_be_pinned() -> None:
    model = tiny_model("llama")
    memory = TieredMemory(host_budget="40KiB")
    with store_of(model, memory=memory, host_budget=None) as store:
        chat = store.open("a")
        turn(chat, some_ids(40))
        with TieredKVCache(model.config, memory=memory, block_size=8, max_tokens=64) as cache:
            model.generate(**ones(some_ids(4)), past_key_values=cache, **GREEDY)
            for what in ("set", "opened"):
                with pytest.raises(BudgetError, match="pinned"):
                    chat.set_rank(pinned=True, priority=3) if what == "set" else store.open("a", pinned=True)
                assert (chat.pinned, chat.priority) == (False, 0)
                store.check_integrity()
        chat.pinned = True
        with (
            TieredKVCache(model.config, memory=memory, block_size=8, max_tokens=64) as cache,
            pytest.raises(BudgetError),
        ):
            model.generate(**ones(some_ids(4)), past_key_values=cache, **GREEDY)
        chat.close()
        with TieredKVCache(model.config, memory=memory, block_size=8, max_tokens=64) as cache:
            model.generate(**ones(some_ids(4)), past_key_values=cache, **GREEDY)
    memory.close()


def test_a_saved_pin_takes_nothing_that_caches_were_promised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever opens the conversation hears of no error. It is pinned in memory once there is room for that."""
    model, ids = tiny_model("llama"), some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        turn(store.open("a", pinned=True), ids)
    memory = TieredMemory(host_budget="40KiB")
    with store_of(model, directory=tmp_path, memory=memory, host_budget=None) as store:
        store.generate(**ones(ids), **GREEDY)  # which keeps the same tokens
        with TieredKVCache(model.config, memory=memory, block_size=8, max_tokens=64) as cache:
            model.generate(**ones(some_ids(4)), past_key_values=cache, **GREEDY)
            chat = store.open("a")
            assert chat.pinned
            asked = list[None]()
            memory.conceding.append(lambda: bool(asked.append(None)))  # type: ignore[func-returns-value]
            for ask in (
                lambda: store.open("a"),
                lambda: store.open("a", ttl=1e6),
                lambda: chat.set_rank(priority=3),
                lambda: store.conversations.changed(chat),
            ):
                ask()
                assert not store._kept.ranks.pinned
                store.check_integrity()
            assert (chat.pinned, chat.priority, chat.ttl) == (True, 3, 1e6)
            assert not asked, "who opens a conversation takes nothing from others"
            told = [x.getMessage() for x in caplog.records if x.name == "kvtier.conversation"]
            assert len(told) == 1, "once, however often it is tried"
            assert told[0].startswith("'a' is pinned on the disk, and in memory once there is room")
            memory.conceding.pop()
            more = torch.cat([some_ids(4), some_ids(55, seed=1)], 1)
            model.generate(**ones(more), past_key_values=cache, **(GREEDY | {"max_new_tokens": 2}))
        assert not store._kept.ranks._ranked
        store.generate(**ones(ids), **GREEDY)
        assert store.open("a") is chat
        assert store._kept.ranks.pinned == ("a",)
        store.check_integrity()
    memory.close()


def test_what_several_share_is_as_pinned_as_the_most_pinned_of_them() -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="64KiB", eviction="lru") as store:
        chat = store.open("a")
        first = turn(chat, some_ids(30))
        other = chat.fork("b")
        turn(other, grown(first, 20))  # takes the place of the sequence that it goes on with
        assert store.stats.sequences == 1
        chat.pinned = True
        crowd(store)
        turn(other, grown(first, 20))
        assert other.reuse is not None
        assert 35 <= other.reuse.cached <= 40, "what a pinned one has stays, what is behind it goes"
        turn(chat, grown(first))
        assert chat.reuse is not None
        assert chat.reuse.cached >= 35
        chat.close()
        crowd(store)
        turn(other, grown(first, 20))
        assert other.reuse.cached < 30, "who is forgotten pins nothing"


def test_what_is_behind_a_pinned_end_goes_to_the_token_where_blocks_of_retention_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "TOKENS", 256)
    with store_of(tiny_model("llama")) as store:
        chat = store.open("a", pinned=True)
        first = turn(chat, some_ids(30))
        turn(chat.fork("b"), grown(first, 20))
        with store.memory.lock:
            store._kept.parked.give(1 << 30)
            assert [x.length for x in store._kept.parked.sequences] == [35]
        store.check_integrity()
        turn(chat, grown(first))
        assert chat.reuse is not None
        assert chat.reuse.cached == 35


def test_all_whose_tokens_come_again_have_their_ranks() -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="64KiB", eviction="lru") as store:
        ids = some_ids(50)
        first, second = store.open("a", priority=1), store.open("b", pinned=True)
        turn(first, ids)
        turn(second, grown(ids[:, :30], 4))
        store.clear()
        crowd(store, 1)
        store.generate(**ones(ids[:, :40]), **GREEDY)
        store.check_integrity()
        crowd(store)
        turn(second, grown(ids[:, :30], 4))
        assert second.reuse is not None
        assert second.reuse.cached == 30, "another one has more of that sequence"


def test_what_is_kept_is_compared_with_no_conversation_that_it_is_not_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps a row does not pay for the number of ranked conversations."""

    class Named(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("all of them are looked at")

    with store_of(tiny_model("llama")) as store:
        for n in range(6):
            turn(store.open(f"{n}", priority=1), some_ids(24, seed=n))
        ranks = store._kept.ranks
        looked, find = list[bytes](), ranks._find

        def looking(key: Any, ids: bytes) -> Any:
            looked.append(ids)
            return find(key, ids)

        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_find", looking)
            patch.setattr(ranks, "_ranked", Named(ranks._ranked))
            store.generate(**ones(some_ids(40, seed=9)), **GREEDY)
            assert not looked
            # What goes on behind the tokens of one conversation is looked at for that one.
            longer = grown(torch.tensor([store.open("3").ids]))
            store.open("3").ids = longer[0].tolist()
            store.conversations.changed(store.open("3"))
            looked.clear()
            store.generate(**ones(longer), **GREEDY)
            assert {x[: 20 * 8] for x in looked} == {packed(longer[0].tolist())[: 20 * 8]}
        store.conversations.changed(store.open("3"))
        store.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_whatever_is_done_the_ranks_are_where_the_tokens_are(name: str) -> None:
    rng = random.Random(name)
    with store_of(tiny_model(name), host_budget="600KiB", state_budget="200KiB") as store:
        for _ in range(40):
            chat, other = store.open(f"c{rng.randrange(8)}"), store.open(f"c{rng.randrange(8)}")
            what = rng.random()
            with contextlib.suppress(BudgetError):
                if what < 0.6:
                    ids = rng.choice((chat.ids, other.ids, [7] * 5)) + rng.choices(range(1, 9), k=rng.randrange(1, 20))
                    chat.generate(torch.tensor([ids[-300:]]), do_sample=False, max_new_tokens=3)
                elif what < 0.8:
                    chat.set_rank(pinned=rng.random() < 0.15, priority=rng.randrange(3), ttl=rng.choice((0.01, 100)))
                elif what < 0.9 and len(chat.ids) > 20:
                    chat.drop(4, len(chat.ids) - 3)
                elif what < 0.95:
                    chat.close()
                else:
                    chat.park()
            store.check_integrity()


@pytest.mark.parametrize("device_budget", [None, 60_000], ids=["one tier", "two tiers"])
def test_what_is_behind_a_gap_is_pinned_too(device_budget: int | None) -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="100KiB", device_budget=device_budget, eviction="lru") as store:
        chat = store.open("a", pinned=True)
        out = turn(chat, some_ids(100))
        chat.drop(20, 38)
        chat.drop(60, 61)
        crowd(store, 16)
        inputs = grown(out)
        turn(chat, inputs)
        assert chat.reuse is not None
        assert chat.reuse.cached == 105 - 20 - 4
        chat.drop(20, 40)
        chat.pinned = False
        store.check_integrity()
        crowd(store, 16)
        turn(chat, inputs)
        assert chat.reuse.cached < 60, "it is given up as others are"


def test_what_is_behind_a_gap_has_the_priority_and_the_time_to_live_of_the_conversation() -> None:
    model = tiny_model("llama")
    with store_of(model, eviction="lru") as store:
        chat = store.open("a", priority=3, ttl=100)
        turn(chat, some_ids(100))
        chat.drop(20, 40)
        tree = store._kept.retention._tree
        assert {tree.node(x).priority for x in tree} == {3}
        assert all(tree.node(x).expires == tree.node(x).time + 100 for x in tree)
        chat.rewind(tokens=70)
        assert {tree.node(x).priority for x in tree} == {0, 3}, "what it does not go on with any more"
        store.check_integrity()


def test_a_rewound_conversation_pins_what_is_left_of_it() -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="64KiB", eviction="lru") as store:
        chat = store.open("a", pinned=True)
        out = turn(chat, some_ids(50))
        chat.rewind(tokens=39)
        crowd(store)
        turn(chat, grown(out))
        assert chat.reuse is not None
        assert 16 <= chat.reuse.cached <= 24


def test_a_lower_priority_goes_before_a_higher_one_whatever_was_used_last() -> None:
    model = tiny_model("llama")
    with store_of(model, host_budget="64KiB", eviction="lru") as store:
        chats = {n: store.open(str(n), priority=n) for n in (2, -1, 1)}
        outs = {n: turn(chat, some_ids(16, seed=n + 5)) for n, chat in chats.items()}
        kept = store._kept
        gone = []
        with store.memory.lock:
            while kept.parked.give(1):
                kept.ranks.refresh()
                gone.append(tuple(n for n in (-1, 1, 2) if kept.ranks._ranked[str(n)].tokens))
        assert list(dict.fromkeys(gone)) == [(-1, 1, 2), (1, 2), (2,), ()]
        chats[2].priority = -7
        for n, chat in chats.items():
            turn(chat, grown(outs[n]))
        with store.memory.lock:
            kept.parked.give(1)
            kept.ranks.refresh()
        tokens = {n: kept.ranks._ranked[str(n)].tokens for n in chats}
        assert tokens[2] < tokens[-1] == tokens[1]


def test_what_was_not_used_for_its_time_to_live_goes_first() -> None:
    model, now = tiny_model("llama"), [0.0]
    with store_of(model, host_budget="64KiB", eviction="lru") as store:
        store._kept.retention._clock = lambda: now[0]
        short, long = store.open("short", ttl=10, priority=1), store.open("long", ttl=1000, priority=1)
        a, b = turn(short, some_ids(16)), turn(long, some_ids(16, seed=1))

        def tokens() -> tuple[int, int]:
            with store.memory.lock:
                store._kept.parked.give(1)
                store._kept.ranks.refresh()
                found = store._kept.ranks._ranked
                return found["short"].tokens, found["long"].tokens

        now[0] = 9.0
        a = turn(short, grown(a))
        now[0] = 18.0
        b = turn(long, grown(b))
        crowd(store, 1)
        assert tokens() == (31, 31)  # of another one, which nobody has ranked, goes first, used last as it was
        now[0] = 20.0
        with store.memory.lock:
            given = store._kept.retention._tree.victim(now[0])
        assert given is not None
        assert given.expires == 19.0
        before = tokens()
        assert before[0] < 31
        assert before[1] == 31
        short.pinned = True
        kept = tokens()
        for _ in range(20):
            assert tokens()[0] == kept[0], "what is pinned does not expire"


def test_what_others_use_of_it_lives_on() -> None:
    model, now = tiny_model("llama"), [0.0]
    with store_of(model, eviction="lru") as store:
        store._kept.retention._clock = lambda: now[0]
        first = turn(store.open("a", ttl=10), some_ids(35))
        now[0] = 8.0
        store.generate(**ones(grown(first)), **GREEDY)
        tree = store._kept.retention._tree
        assert {tree.node(x).expires for x in tree} == {18.0, math.inf}


def test_a_turn_of_a_pinned_conversation_is_pinned_before_its_room_is_free_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = tiny_model("llama"), list[int]()
    changed = Conversations.changed

    def noting(self: Conversations, chat: Conversation, **options: Any) -> None:
        found = store._kept.ranks._ranked.get(chat.name)
        seen.append(0 if found is None else found.tokens)
        changed(self, chat, **options)

    with store_of(model) as store:
        chat = store.open("a", pinned=True)
        monkeypatch.setattr(Conversations, "changed", noting)
        for _ in range(3):
            turn(chat, grown(torch.tensor([chat.ids or [3] * 20])))
            assert seen[-1] == len(chat.ids) - 1


def test_copies_of_states_of_what_is_pinned_stay() -> None:
    model = tiny_model("qwen3_next")
    with store_of(model) as store:
        turn(store.open("a"), some_ids(30))
        each = store.stats.state_bytes
    with store_of(model, state_budget=2 * each) as store:
        chat = store.open("a", pinned=True)
        out = turn(chat, some_ids(30))
        crowd(store, 4)
        assert store.stats.state_bytes <= 2 * each
        turn(chat, grown(out))
        assert chat.reuse is not None
        assert chat.reuse.cached == 35


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_of_what_is_pinned_the_last_states_that_can_be_continued_stay(name: str) -> None:
    """Another sequence may have more of its tokens, and no states there."""
    model = tiny_model(name)
    with store_of(model, host_budget=BUDGETS[name]) as store:
        history = some_ids(30, seed=1)
        other = torch.cat([history[:, :14], some_ids(1, seed=2)], 1)
        for ids in (other, history):
            store.generate(**ones(ids), **(GREEDY | {"max_new_tokens": 1}))
        chat = store.open("a")
        chat.ids = history[0, :18].tolist()
        chat.pinned = True
        crowd(store, 16)
        turn(chat, torch.cat([history[:, :17], some_ids(3, seed=3)], 1))
        assert chat.reuse is not None
        assert chat.reuse.cached == 14


def test_copies_of_states_of_what_is_pinned_stay_where_there_come_more_than_are_kept() -> None:
    model = tiny_model("qwen3_next")
    with store_of(model) as store:
        pinned, chat = store.open("a"), store.open("b")
        out = turn(chat, some_ids(12))
        pinned.ids = out[0].tolist()
        pinned.pinned = True
        for _ in range(MOST_STATES):
            out = turn(chat, grown(out))
        store.check_integrity()
        turn(pinned, grown(torch.tensor([pinned.ids]), seed=2))
        assert pinned.reuse is not None
        assert pinned.reuse.cached == 17


@pytest.mark.parametrize("pinned", [False, True])
def test_of_states_those_at_the_end_of_a_turn_stay(pinned: bool) -> None:
    """A longer sequence has all tokens of the turn already, and one copy has all of the budget."""
    model = tiny_model("qwen3_next")
    with store_of(model) as store:
        turn(store.open("a"), some_ids(12))
        [entry] = store.kept.entries.values()
        one = store.stats.state_bytes // len(entry.states)
    with store_of(model, state_budget=one) as store:
        history = turn(store.open("a", pinned=pinned), some_ids(12))
        longer = store.generate(**ones(grown(history)), **GREEDY)[0].tolist()
        [entry] = store.kept.entries.values()
        [states] = entry.states.values()
        end, epoch = len(longer) - 3, store.kept.epoch
        again = store.kept.add(entry.key, packed(longer[:end]), lambda *_: None, {end: states}, "a", epoch=epoch)
        assert again is entry
        assert list(entry.states) == [end], "the next turn has nothing to go on from"
        store.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [
        {"pinned": 1},
        {"priority": 1.5},
        {"priority": True},
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": math.nan},
        {"ttl": 10**400},
    ],
)
def test_ranks_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("a", priority=2)
        with pytest.raises(ConfigError):
            chat.set_rank(**wrong)
        with pytest.raises(ConfigError):
            store.open("b", **wrong)
        assert store.names == ["a"]
        assert (chat.pinned, chat.priority, chat.ttl) == (False, 2, math.inf)


# On the disk


def test_a_priority_may_be_any_integer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for at in (10**400, -(10**400)):
        with store_of(model, directory=tmp_path) as store:
            turn(store.open("a", priority=at), some_ids(20))
        with store_of(model, directory=tmp_path, disk_budget="40KiB") as store:
            assert store.open("a").priority == at
            crowd(store, 3)
            store.flush()
            assert store.stats.problem == ""


def chains(disk: Disk, rng: random.Random) -> list[list[int]]:
    """Save some sequences that share their beginnings."""
    made: list[list[int]] = []
    for _ in range(8):
        ids = list(rng.choice(made)[: rng.randrange(1, 40)]) if made and rng.random() < 0.6 else []
        ids += [rng.randrange(5) for _ in range(rng.randint(2, 9))]
        assert save(disk, ids, KEY)
        made.append(ids)
    return made


KEY = "(None, None)"


@pytest.mark.parametrize("seed", range(20))
def test_the_disk_gives_up_what_expired_then_by_priority_and_never_what_is_pinned(seed: int, tmp_path: Path) -> None:
    rng, now = random.Random(seed), [1000.0]
    disk = disk_of(tmp_path)
    disk.clock = lambda: now[0]  # type: ignore[method-assign,assignment]
    made = chains(disk, rng)
    ranks: dict[int, tuple[Rank, float]] = {}
    for i in rng.sample(range(8), 5):
        ranks[i] = (
            Rank(rng.random() < 0.3, rng.randrange(-2, 3), rng.choice((5.0, 50.0, math.inf))),
            rng.uniform(960, 1000),
        )
        disk.rank(str(i), None, packed(made[i]), *ranks[i])

    def level(chunk: Chunk) -> float:
        """Of all that refer to it, and of all that continue it, the highest."""
        mine: list[float] = []
        for i, (rank, used) in ranks.items():
            if rank != Rank() and chunk.number in next(disk._chunks.under([(None, packed(made[i]))])):
                mine.append(math.inf if rank.pinned else -math.inf if used + rank.ttl <= now[0] else rank.priority)
        return max([*(mine or [0.0]), *(at[x.number] for x in chunk.below)])

    order, at = list(disk._chunks), dict[int, float]()
    for chunk in order:
        at[chunk.number] = level(chunk)
    expected = [x.number for x in sorted(order, key=lambda x: at[x.number]) if at[x.number] < math.inf]
    gone = []
    while True:
        disk.room.budget = disk.room.nbytes - 1
        before = set(disk._chunks.numbers)
        if why := disk.room.begin(0, None, disk.clock):
            break
        assert not disk.room.sweep()
        (number,) = before - set(disk._chunks.numbers)
        gone.append(number)
        disk.check_integrity()
    assert gone == expected
    assert "pinned" in why or not disk._chunks
    for ids, i in zip(made, range(8), strict=True):
        if i in ranks and ranks[i][0].pinned:
            assert load(disk, ids, KEY) == len(ids)
    disk.close()


def test_a_clock_that_was_set_back_begins_a_time_to_live_again(tmp_path: Path) -> None:
    now = [1000.0]
    disk = disk_of(tmp_path)
    disk.clock = lambda: now[0]  # type: ignore[method-assign,assignment]
    assert save(disk, [1, 2, 3], KEY)
    disk.rank("a", None, packed([1, 2, 3]), Rank(ttl=10), 5000.0)
    for at, gone in ((1000.0, 0), (1009.0, 0), (1010.0, 1), (1010.0, 0)):
        now[0] = at
        assert disk.expire() == gone
    assert disk.chunks == 0
    disk.close()


def test_what_is_pinned_or_has_a_priority_is_so_in_a_later_process(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        chat = store.open("a", pinned=True, priority=2, ttl=70)
        out = turn(chat, some_ids(40))
    with store_of(model, directory=tmp_path, host_budget="64KiB") as store:
        chat = store.open("a")
        assert (chat.pinned, chat.priority, chat.ttl) == (True, 2, 70.0)
        assert chat.wake(wait=True).loaded == 45
        crowd(store)
        out = turn(chat, grown(out))
        assert chat.reuse is not None
        assert (chat.reuse.cached, chat.reuse.loaded) == (45, 0), "what was loaded is pinned"
        crowd(store)
        turn(chat, grown(out))
        assert chat.reuse is not None
        assert (chat.reuse.cached, chat.reuse.loaded) == (out.shape[1] - 1, 0)
        store.check_integrity()


@pytest.mark.parametrize("of_before", [False, True])
def test_a_conversation_with_a_rank_is_read_when_somebody_asks_for_it(
    of_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, init, asked = tiny_model("llama"), Manifest.__init__, list[str]()

    def traced(manifest: Manifest, *args: Any, **options: Any) -> None:
        init(manifest, *args, **options)
        manifest.db.set_trace_callback(asked.append)

    with store_of(model, directory=tmp_path) as store:
        turn(store.open("a", pinned=True), some_ids(20))
        turn(store.open("b", ttl=1000, priority=2), some_ids(20, seed=1))
    if of_before:
        of_layout_5(tmp_path)
        with store_of(model, directory=tmp_path) as store:  # which reads them, once
            assert not store._kept.ranks._ranked
            assert all(x is None for x in store.conversations._known.values()), "they are in memory"
    monkeypatch.setattr(Manifest, "__init__", traced)
    with store_of(model, directory=tmp_path) as store:
        assert asked, "nothing was traced"
        assert not [x for x in asked if x.startswith("SELECT") and ("state" in x or "pieces" in x)]
        assert store._disk_tier is not None
        levels = store._disk_tier.disk._order._levels(time.time)
        assert sorted(levels.values()) == [2, math.inf]
        assert not store._kept.ranks._ranked
        chat = store.open("a")
        found = store._kept.ranks._ranked[chat.name]
        assert (found.rank, found.ids) == (chat.rank, packed(chat.ids[:-1]))


def test_what_is_saved_behind_a_turn_has_the_rank_of_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed then, and the next one reads no conversation."""
    model = tiny_model("llama")

    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        order = store._disk_tier.disk._order
        with monkeypatch.context() as patch:
            goes_on = held_writes(patch)
            try:
                turn(store.open("a", pinned=True), some_ids(20))
                store.open("a").fork("b")
                assert order._waiting.keys() == {"a"}, "others have no rank"
                store.conversations.save_all()
                assert order._waiting.keys() == {"a"}, "it has not gone on since, and waits still"
            finally:
                goes_on.set()
            store._disk_tier.flush()
        assert not order._waiting, "its ids are in memory still"
        shutil.copytree(tmp_path, copied := tmp_path.with_name("copied"))
    disk = Disk(copied, None, fingerprint.fingerprint(model))
    assert disk.rank_saved(disk.names()) == []
    assert list(disk._order._levels(time.time).values()) == [math.inf]
    disk.close()


def test_what_is_pinned_stays_on_a_full_disk_and_others_are_not_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        for i in range(2):
            turn(store.open(str(i), pinned=i == 0), some_ids(40, seed=i))
        store.flush()
        nbytes = store.stats.saved_bytes + 4096
    with store_of(model, directory=tmp_path, disk_budget=nbytes) as store:
        turn(store.open("1"), some_ids(40, seed=7))
        store.flush()
        assert store.stats.problem == ""
        store.open("1", pinned=True)
        turn(store.open("2"), some_ids(40, seed=8))
        store.flush()
        assert "'0', '1' pinned" in store.stats.problem
    with store_of(model, directory=tmp_path) as store:
        for i, seed in ((0, 0), (1, 7)):
            turn(store.open(str(i)), some_ids(40, seed=seed))
            assert store.reuse[0].loaded == 39


@pytest.mark.parametrize("shared", [False, True])
def test_what_has_expired_is_removed_when_the_folder_is_opened(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, later = tiny_model("llama"), [0.0]
    clock = time.time
    monkeypatch.setattr(Disk, "clock", staticmethod(lambda: clock() + later[0]))
    with store_of(model, directory=tmp_path) as store:
        first = turn(store.open("a", ttl=100), some_ids(40))
        turn(store.open("b", ttl=1000), some_ids(40, seed=1))
        if shared:
            store.generate(**ones(grown(first)), **GREEDY)
    for seconds, tokens in ((-5000.0, [45, 45]), (90.0, [45, 45]), (110.0, [45 if shared else 0, 45])):
        later[0] = seconds
        with store_of(model, directory=tmp_path) as store:
            assert sorted(store.names) == ["a", "b"], "what was said stays"
            for name, there in zip("ab", tokens, strict=True):
                ids = packed(store.open(name).ids)
                assert store._disk_tier is not None
                index = store._disk_tier.disk._chunks._index
                found = max(index.find(key, ids)[0] for key in index.all_keys())
                assert found >= there
                assert there or not found, "what has expired is there"


def test_a_sequence_is_the_history_of_all_conversations_that_it_begins_like() -> None:
    model = tiny_model("llama")
    with store_of(model) as store:
        begin = some_ids(30)
        for name, tokens in (("most", 30), ("some", 20), ("few", 10)):
            turn(store.open(name, pinned=True), grown(begin[:, :tokens], 5, seed=tokens))
        store.clear()
        store.check_integrity()
        store.generate(**ones(begin), **GREEDY)
        found = {name: x.tokens for name, x in store._kept.ranks._ranked.items()}
        assert found == {"most": 30, "some": 20, "few": 10}
        store.check_integrity()
