"""The default policy keeps within its numbers; policies of others decide, and whatever they answer is exact."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from least_recently_used import EvictLeastRecentlyUsed
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import BudgetError, ConfigError, Policy, TieredKVCache, TieredMemory
from kvtier.forward import planned
from kvtier.planning.costs import Prediction
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import RESERVE_SHARE, Candidate, Victims, fill, level
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState
from kvtier.testing import held, with_doubles

# The default


def drawn(rng: random.Random) -> StepState:
    """A cache of several layers, to some of which the host may attend."""
    block, hosted = rng.choice((64, 4096)), rng.choice((0.0, 0.5, 1.0))
    layers = []
    for i in range(rng.randint(1, 6)):
        spilled = rng.randint(0, 30)
        layers.append(
            LayerState(
                layer=i,
                block_bytes=block,
                resident=rng.randint(0, 30),
                fetched=rng.randint(0, spilled),
                spilled=spilled,
                sequences=rng.randint(1, 3),
                host_attention=rng.random() < hosted,
            )
        )
    size = block * rng.randint(1, 400)
    found = StepState(tokens=rng.choice((1, 7)), layers=layers, free_bytes=rng.randint(0, size), device_bytes=size)
    found.last = StepRecord() if rng.random() < 0.7 else None
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"write_through": 7},
        {"write_through": "a"},
        {"write_through": -0.1},
        {"ahead": -1},
        {"ahead": 1.5},
        {"ahead": "a"},
    ],
    ids=str,
)
def test_a_policy_is_made_of_a_share_and_a_number_of_layers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Policy(**wrong)
    with pytest.raises(ConfigError, match="share"):
        FixedShare(1.5)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_fetches_what_the_host_does_not_attend_to_and_keeps_what_there_is_room_for(seed: int) -> None:
    rng = random.Random(seed)
    state, ahead = drawn(rng), rng.randint(0, 5)
    plan = Policy(ahead=ahead).plan(state)
    assert len(plan.layers) == len(state.layers)
    pairs = list(zip(state.layers, plan.layers, strict=True))
    fetching = [(x, p) for x, p in pairs if not x.host_attention]
    for x, p in pairs:
        assert 0 <= p.keep <= p.fetch <= x.spilled, "never more than there is"
        assert p.fetch == (p.keep if x.host_attention else x.spilled), "fetched, or attended to on the host"
        assert p.ahead == ahead
    most = max((x.spilled * x.block_bytes for x, _ in fetching), default=0)
    assert plan.reserve == min(most, state.device_bytes // RESERVE_SHARE)
    # Room that neither the fetches nor the next new blocks ask back.
    room = state.free_bytes - 2 * plan.reserve
    room += sum((x.fetched - x.sequences) * x.block_bytes for x in state.layers)
    if not fetching:
        room -= state.device_bytes // RESERVE_SHARE  # the host attends to them where they are
    staying = fetching or pairs
    block = state.layers[0].block_bytes
    assert sum(p.keep for _, p in pairs) == sum(p.keep for _, p in staying)
    if state.last is None and not fetching:
        assert all(p.keep == 0 for p in plan.layers), "the first token waits for nothing that the host attends to"
        return
    assert sum(p.keep for _, p in staying) == min(max(room, 0) // block, sum(x.spilled for x, _ in staying))
    least = min((x.resident + p.keep for x, p in staying if p.keep < x.spilled), default=math.inf)
    assert all(x.resident + p.keep <= least + 1 or p.keep == 0 for x, p in staying), "the emptiest are filled first"


@pytest.mark.parametrize("seed", range(20))
def test_levelling_takes_from_the_highest_and_touches_none_below_the_level(seed: int) -> None:
    rng = random.Random(seed)
    amounts = [(i, rng.randint(0, 12)) for i in range(rng.randint(0, 9))]
    total = rng.randint(0, 60)
    taken = dict(level(amounts, total))
    assert sum(taken.values()) == min(total, sum(n for _, n in amounts))
    assert all(taken.values()), "nobody gives nothing"
    left = {i: n - taken.get(i, 0) for i, n in amounts}
    highest = max(left.values(), default=0)
    assert all(n >= 0 for n in left.values())
    assert all(left[i] == n or left[i] >= highest - 1 for i, n in amounts)


@pytest.mark.parametrize("seed", range(50))
def test_filling_adds_to_the_lowest_and_undoes_levelling(seed: int) -> None:
    rng = random.Random(seed)
    amounts = [(i, rng.randint(0, 12), rng.randint(0, 12)) for i in range(rng.randint(0, 9))]
    total = rng.randint(0, 60)
    added = dict(fill(amounts, total))
    assert sum(added.values()) == min(total, sum(most for *_, most in amounts))
    assert all(added.values()), "nobody gets nothing"
    now = {i: n + added.get(i, 0) for i, n, _ in amounts}
    lowest = min((now[i] for i, n, most in amounts if now[i] < n + most), default=math.inf)
    assert all(now[i] <= n + most for i, n, most in amounts)
    assert all(now[i] == n or now[i] <= lowest + 1 for i, n, _ in amounts)
    # Whatever left comes back to where it was, but for the order among equals.
    full = [(i, n) for i, n, _ in amounts]
    taken = dict(level(full, total))
    back = dict(fill([(i, n - taken.get(i, 0), taken.get(i, 0)) for i, n in full], sum(taken.values())))
    assert back == taken
    part = rng.randint(0, sum(taken.values()))
    back = dict(fill([(i, n - taken.get(i, 0), taken.get(i, 0)) for i, n in full], part))
    less = dict(level(full, sum(taken.values()) - part))
    assert all(abs(taken.get(i, 0) - back.get(i, 0) - less.get(i, 0)) <= 1 for i, _ in full)


@dataclass
class Blocks:
    """A candidate."""

    layer: int
    evictable: int
    transient: int = 0
    owner: int = 0
    last_used: int = 0


@pytest.mark.parametrize("seed", range(20))
def test_layers_spill_evenly_and_what_was_fetched_for_one_use_goes_last_the_latest_first(seed: int) -> None:
    rng = random.Random(seed)
    candidates: list[Candidate] = []
    for i in range(rng.randint(1, 5)):
        evictable = rng.randint(1, 12)
        candidates.append(Blocks(i, evictable, rng.randint(0, evictable)))
    wanted = rng.randint(1, 30)
    victims = list(Policy().victims(candidates, wanted))
    staying = [v for v in victims if not v.latest_first]
    fetched = [v for v in victims if v.latest_first]
    assert victims == staying + fetched
    assert sum(v.blocks for v in staying) == min(wanted, sum(x.evictable - x.transient for x in candidates))
    assert {v.candidate.layer: v.blocks for v in fetched} == {x.layer: x.transient for x in candidates if x.transient}
    taken = [sum(v.blocks for v in staying if v.candidate is x) for x in candidates]
    left = [x.evictable - x.transient - n for x, n in zip(candidates, taken, strict=True)]
    assert all(n >= 0 for n in left)
    assert all(n >= max(left) - 1 for n, some in zip(left, taken, strict=True) if some)


def test_in_turn_the_first_gives_all_that_is_needed_then_the_next() -> None:
    a, b, c = Blocks(0, 3), Blocks(1, 0), Blocks(2, 5)
    assert Policy.in_turn([a, b, c], 2) == [Victims(a, 2)]
    assert Policy.in_turn([a, b, c], 5) == [Victims(a, 3), Victims(c, 2)]
    assert Policy.in_turn([a, b, c], 50) == [Victims(a, 3), Victims(c, 5)]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_nothing_is_written_back_below_the_watermark_and_never_less_with_more_in_use(share: float) -> None:
    policy = Policy(write_through=share)
    counts = [policy.write_back(used, 1000, 3) for used in range(0, 1001, 10)]
    assert counts == sorted(counts)
    assert [bool(c) for c in counts] == [used >= share * 1000 for used in range(0, 1001, 10)]
    sealed = [Policy(write_through=0.9).write_back(900, 1000, n) for n in range(5)]
    assert all(count >= n for n, count in enumerate(sealed)), "the backlog must not grow above the watermark"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_when_the_budget_is_full_every_sealed_block_has_its_copy(share: float) -> None:
    budget, used, backlog, policy = 1000, 0, 0, Policy(write_through=share)
    while used < budget:
        used += 1
        backlog += 1
        backlog -= min(backlog, policy.write_back(used, budget, 1))
    assert backlog == 0


# Policies of others

SIZE, NEW_TOKENS = 4, 12
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
)
SLOT = 2 * 8 * SIZE * 4


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return LlamaForCausalLM(CONFIG).eval()


def tokens(model: LlamaForCausalLM, cache: DynamicCache, prompt: torch.Tensor) -> list[int]:
    """What `generate` makes of a prompt, greedily."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0].tolist()


def test_least_recently_used_is_a_policy_in_one_file_and_gives_exact_tokens(model: LlamaForCausalLM) -> None:
    prompt = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = TieredKVCache(CONFIG, device_budget=12 * SLOT, block_size=SIZE, policy=EvictLeastRecentlyUsed())
    assert tokens(model, cache, prompt) == tokens(model, DynamicCache(config=CONFIG), prompt)
    assert cache.stats.evictions > 10
    cache.check_integrity()


@pytest.mark.parametrize("policy", [Policy, EvictLeastRecentlyUsed])
def test_the_policy_says_which_of_two_caches_on_one_memory_gives_way(policy: type[Policy]) -> None:
    torch.manual_seed(0)
    memory = TieredMemory(device_budget=20 * SLOT, host_budget=10**6, policy=policy())
    used, idle = (TieredKVCache(memory=memory, block_size=SIZE) for _ in range(2))

    def use(cache: TieredKVCache, count: int) -> None:
        x = torch.randn(1, 1, count, 8)
        keys, values = cache.update(x, x, 0)
        if keys.shape[2] > count:
            torch.nn.functional.scaled_dot_product_attention(x, keys, values)

    def on_device(cache: TieredKVCache) -> int:
        return sum(x.device_blocks for x in cache.residency().layers)

    use(used, 9 * SIZE)
    use(idle, 9 * SIZE)
    for cache in (idle, used):
        use(cache, 1)
    before = on_device(idle)
    for _ in range(9 * SIZE):
        use(used, 1)
    if policy is Policy:
        assert abs(on_device(used) - on_device(idle)) <= 2, "layers stay as full as each other"
    else:
        assert on_device(idle) <= before - 7, "what nobody used has left"
        assert on_device(used) >= 17
    memory.check_integrity()


class Whimsical(Policy):
    """Answers at random: too much, too little, nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.seen: list[StepRecord] = []
        self.last_of_plans: list[StepRecord | None] = []

    def plan(self, state: StepState) -> StepPlan:
        """Any numbers for each layer."""
        self.last_of_plans.append(state.last)
        layers = [LayerPlan(*self.random.choices((0, 1, 3, 1000), k=3)) for _ in state.layers]
        return StepPlan(layers, self.random.choice((0, state.device_bytes, 10 * state.device_bytes)))

    def observe(self, record: StepRecord) -> None:
        """Remember it."""
        self.seen.append(record)

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        """In any order, one or more than there are, the oldest or the latest."""
        for x in self.random.sample(list(candidates), len(candidates)):
            yield Victims(x, self.random.choice((1, 1000)), self.random.random() < 0.5)

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """Any number."""
        return self.random.choice((0, 1, 1000))


@pytest.mark.parametrize("host_attention", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_policy_answers_is_exact(seed: int, host_attention: bool, model: LlamaForCausalLM) -> None:
    prompt = torch.randint(64, (1, 45), generator=torch.Generator().manual_seed(seed))
    policy = Whimsical(seed)
    cache = TieredKVCache(
        CONFIG, device_budget=24 * SLOT, block_size=SIZE, host_attention=host_attention, policy=policy
    )
    with_doubles(cache, held(seed))
    assert tokens(model, cache, prompt) == tokens(model, DynamicCache(config=CONFIG), prompt)
    assert cache.stats.evictions > 5
    cache.check_integrity()


class Nonsense(Policy):
    """As the default, until it is asked to answer something that is no decision."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, Any] = {}

    def plan(self, state: StepState) -> StepPlan:
        """The default's plan, or with a number that is none."""
        plan = self.wrong.get("plan", super().plan(state))
        for name in ("fetch", "ahead", "keep", "leave"):
            if name in self.wrong:
                setattr(plan.layers[-1], name, self.wrong[name])
        for name in ("layers", "reserve", "on_host"):
            if name in self.wrong:
                setattr(plan, name, self.wrong[name])
        return plan  # type: ignore[no-any-return]

    def prediction(self, cache: int, device: str) -> Prediction | None:
        """None, or something that is no prediction."""
        return self.wrong.get("prediction")

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        """The default's, or others."""
        if "blocks" in self.wrong:
            return [Victims(x, self.wrong["blocks"]) for x in candidates]
        return self.wrong.get("victims", super().victims(candidates, blocks))  # type: ignore[no-any-return]

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """The default's number, or another."""
        return self.wrong.get("write_back", super().write_back(used_bytes, device_bytes, sealed))  # type: ignore[no-any-return]


@pytest.mark.parametrize("named", ["fetch", "ahead", "keep", "leave", "reserve", "write_back", "blocks"])
@pytest.mark.parametrize("wrong", [1.5, math.nan, None])
def test_a_number_that_is_no_whole_one_is_refused_by_name_and_the_cache_goes_on(
    named: str, wrong: object, model: LlamaForCausalLM
) -> None:
    refused_and_mended(model, {named: wrong}, named)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"plan": None}, "StepPlan"),
        ({"layers": None}, "list of LayerPlan"),
        ({"layers": [LayerPlan()]}, "1 layers where 3"),
        ({"on_host": 3}, "list of rows"),
        ({"on_host": "row"}, "on_host is 'r'"),
        ({"on_host": [0.5]}, "on_host is 0.5"),
        ({"victims": None}, "list of Victims"),
        ({"victims": [3]}, r"Victims\(candidate"),
        ({"prediction": 0.1}, "prediction is 0.1"),
        ({"prediction": Prediction(0.5, math.nan, 0.0, 0.0, 0.0, 0.0, 0, 0)}, "prediction is Prediction"),
    ],
)
def test_what_is_no_decision_is_refused_in_a_sentence_and_the_cache_goes_on(
    wrong: dict[str, Any], said: str, model: LlamaForCausalLM
) -> None:
    refused_and_mended(model, wrong, said)


@pytest.mark.parametrize("host_attention", [True, False])
def test_a_step_that_lacks_room_because_a_policy_evicts_too_little_says_so(
    host_attention: bool, model: LlamaForCausalLM
) -> None:
    ids, policy = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0)), Nonsense()
    with (
        TieredKVCache(
            CONFIG, device_budget=24 * SLOT, block_size=SIZE, policy=policy, host_attention=host_attention
        ) as cache,
        torch.no_grad(),
    ):
        model(ids[:, :45], past_key_values=cache)
        policy.wrong = {"victims": []}
        with pytest.raises(BudgetError, match=r"Nonsense.victims names too few blocks to evict, \d+ more could leave"):
            decode(model, ids[:, 45:], cache)
        policy.wrong = {}
        cache.check_integrity()


def refused_and_mended(model: LlamaForCausalLM, wrong: dict[str, Any], said: str) -> None:
    """A policy answers `wrong` in the middle of a decode; with a better answer the tokens are the right ones."""
    ids = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0))
    policy, right = Nonsense(), DynamicCache(config=CONFIG)
    with (
        TieredKVCache(CONFIG, device_budget=24 * SLOT, block_size=SIZE, policy=policy) as cache,
        torch.no_grad(),
    ):
        model(ids[:, :45], past_key_values=cache)
        policy.wrong, done = wrong, list[torch.Tensor]()
        with pytest.raises(ConfigError, match=said):
            done.extend(model(x[None, None], past_key_values=cache).logits for x in ids[0, 45 : 45 + 2 * SIZE])
        policy.wrong, had = {}, 45 + len(done)  # blocks were sealed and evicted in it
        cache.check_integrity()
        with contextlib.suppress(ValueError):  # it was not begun
            cache.crop(0)
        assert cache.get_seq_length() == had
        model(ids[:, :had], past_key_values=right)
        found, expected = (decode(model, ids[:, had:], each) for each in (cache, right))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        cache.check_integrity()


def decode(model: LlamaForCausalLM, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits of some tokens, one by one."""
    return torch.stack([model(x[None, None], past_key_values=cache).logits for x in ids[0]])


@pytest.mark.parametrize("whole", [True, torch.tensor(1)])
def test_what_counts_as_a_whole_number_is_taken_as_one(whole: Any, model: LlamaForCausalLM) -> None:
    ids, policy = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0)), Nonsense()
    policy.wrong = dict.fromkeys(("fetch", "ahead", "keep", "leave", "reserve", "write_back"), whole)
    cache = TieredKVCache(CONFIG, device_budget=24 * SLOT, block_size=SIZE, policy=policy)
    assert tokens(model, cache, ids) == tokens(model, DynamicCache(config=CONFIG), ids)
    cache.check_integrity()


@pytest.mark.parametrize("collection", [tuple, lambda plans: dict(enumerate(plans)).values()], ids=["tuple", "dict"])
def test_plans_of_layers_are_in_any_collection(collection: Any, model: LlamaForCausalLM) -> None:
    ids, policy = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0)), Nonsense()
    policy.wrong = {"layers": collection([LayerPlan(fetch=2, ahead=1) for _ in range(3)]), "reserve": 4 * SLOT}
    cache = TieredKVCache(CONFIG, device_budget=24 * SLOT, block_size=SIZE, policy=policy)
    assert tokens(model, cache, ids) == tokens(model, DynamicCache(config=CONFIG), ids)
    assert cache.stats.block_fetches
    cache.check_integrity()


def test_a_policy_tells_the_caches_of_two_memories_apart(model: LlamaForCausalLM) -> None:
    ids, policy = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0)), Whimsical(0)
    for _ in range(2):
        with TieredKVCache(CONFIG, device_budget=24 * SLOT, block_size=SIZE, policy=policy) as cache:
            tokens(model, cache, ids)
    assert len({record.cache for record in policy.seen}) == 2


def test_what_a_step_takes_ends_as_another_cache_begins_one(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two caches of a memory in turn, a second for each forward and ten behind it: each is told of its own."""
    now = [0.0]
    monkeypatch.setattr(planned, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    ids, policy = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0)), Whimsical(0)
    memory = TieredMemory(device_budget=48 * SLOT, policy=policy)
    with torch.no_grad():
        caches = [TieredKVCache(CONFIG, memory=memory, block_size=SIZE) for _ in range(2)]
        for step in range(6):
            for cache in caches[: 1 if step == 5 else 2]:
                model(ids[:, :45] if not step else ids[:, 44 + step : 45 + step], past_key_values=cache)
                now[0] += 1.0
            now[0] += 10.0
        of = [[x.seconds for x in policy.seen if x.cache == cache._forward._held.owner.number] for cache in caches]
        # The first one's step ends as the other's begins, and that one's as the first one's next begins.
        assert of[0][-3:] == [1.0, 1.0, 1.0]
        assert of[1][-3:] == [11.0, 11.0, 11.0]
        # A step that begins in the middle of another cache's forward, as one of another thread may, ends nothing.
        first, second = caches
        middle = [lambda: model(ids[:, 49:50], past_key_values=second)]

        def begins_another(*args: Any) -> None:
            if middle:
                now[0] += 3.0
                middle.pop()()

        hook = model.model.layers[1].register_forward_pre_hook(begins_another)
        model(ids[:, 50:51], past_key_values=first)
        hook.remove()
        now[0] += 4.0
        model(ids[:, 51:52], past_key_values=first)
        assert policy.seen[-1].seconds == 7.0
        assert policy.seen[-1].cache == first._forward._held.owner.number
    for cache in caches:
        cache.close()
    memory.close()


@pytest.mark.parametrize("host_attention", [True, False])
def test_a_policy_is_told_what_each_step_took_and_reminded_of_it_at_the_next(
    host_attention: bool, model: LlamaForCausalLM
) -> None:
    """From the first step on that it planned."""
    prompt = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0))
    policy = Whimsical(0)
    cache = TieredKVCache(
        CONFIG, device_budget=24 * SLOT, block_size=SIZE, host_attention=host_attention, policy=policy
    )
    tokens(model, cache, prompt)
    # A step is told of when the next one begins.
    assert [record.tokens for record in policy.seen] == [61] + [1] * (NEW_TOKENS - 2)
    assert {record.layers for record in policy.seen} == {3}
    assert [x for x, _ in itertools.groupby(map(id, policy.last_of_plans))] == [id(None), *map(id, policy.seen)]
    one, stats = torch.zeros(1, 1, dtype=torch.long), [cache.stats]
    for _ in range(2):
        model(one, past_key_values=cache)
        stats.append(cache.stats)
    record, (before, after, _) = policy.seen[-1], stats
    names = {"fetched": "block_fetches", "evicted": "evictions"}
    for name in ("bytes_up", "bytes_down", "host_blocks", "fetched", "evicted"):
        counted = names.get(name, name)
        assert getattr(record, name) == getattr(after, counted) - getattr(before, counted), name
    assert sum(x.host_blocks if host_attention else x.fetched for x in policy.seen)
