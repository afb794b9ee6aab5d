"""Placements that were published, as policies: whole layers in turn (Pie), whole sequences on one side (Neo)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import ConfigError, Policy, TieredKVCache
from kvtier.memory.blocks.block import State
from kvtier.planning.policies.names import POLICIES
from kvtier.planning.policies.neo import WholeSequences
from kvtier.planning.policies.pie import CACHES, WholeLayers
from kvtier.planning.policy import Victims
from kvtier.planning.rates import Rates
from kvtier.planning.reports.log import LoggedCandidate
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState
from kvtier.testing import failing, held, with_doubles

SIZE, LAYERS = 4, 6
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=LAYERS,
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


def prompt(rows: int, tokens: int = 40) -> torch.Tensor:
    return torch.randint(64, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def tokens(model: LlamaForCausalLM, cache: DynamicCache, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    """What `generate` makes of prompts, greedily unless options say otherwise."""
    given = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0} | options
    found = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **given)
    return found.tolist()  # type: ignore[no-any-return]


# Every policy that has a name


@pytest.mark.parametrize("host_attention", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_under_every_named_policy_tokens_are_those_of_dynamic_cache(
    name: str, host_attention: bool, model: LlamaForCausalLM
) -> None:
    for rows, beams, seed in ((3, 1, 1), (1, 3, 2)):
        options: dict[str, Any] = {} if beams == 1 else {"num_beams": beams}
        right = tokens(model, DynamicCache(config=CONFIG), prompt(rows), **options)
        cache = TieredKVCache(
            CONFIG,
            device_budget=(38 * rows if beams == 1 else 64) * SLOT,
            block_size=SIZE,
            host_attention=host_attention,
            policy=name,
        )
        with_doubles(cache, held(seed, late=beams > 1))
        assert tokens(model, cache, prompt(rows), **options) == right, (rows, beams)
        assert cache.stats.evictions > 10
        cache.check_integrity()


# Pie


def test_in_figure_4_every_second_layer_leaves_first_in_first_out_and_nothing_waits() -> None:
    compute, blocks = 1e-3, 36
    layer = blocks * 1024
    load = Load(9, compute, 1024, 64, 64 * blocks, 1, 7 * layer + 9 * 1024)  # seven of nine layers
    rates = Rates(up=layer / (2 * compute), host=1.0, device=1e15, copy_overhead=0.0)
    trial = Simulation(WholeLayers(), Machine(rates), load, traced=True)
    trial.run(23)
    settled = trial.records[5:]
    assert sum(record.fetched for record in settled) == len(settled) * 9 * blocks // 2
    assert sum(record.stall_seconds for record in settled) < 1e-9
    assert sum(record.host_bytes for record in settled) == 0
    began = sum(record.seconds for record in trial.records[:5])
    fetched = [int(event.name.split()[1]) for event in trial.events if event.lane == "up" and event.start > began]
    assert all(b == (a + 2) % 9 for a, b in itertools.pairwise(fetched)), "0, 2, 4, 6, 8, 1, 3 ..."


def test_while_the_link_is_busy_no_layer_leaves_and_none_leaves_for_nothing() -> None:
    policy = WholeLayers()
    away = [False] * 7 + [True] * 2
    assert policy.leaving(away, 0.0) == ([True] * 9, 0.0)
    leaving, busy = policy.leaving(away, 2.0)
    assert [i for i, x in enumerate(leaving) if x] == [0, 2, 4, 6, 8]
    assert busy == 2.0, "the last one comes in the next step"
    assert [i for i, x in enumerate(policy.leaving(away, 2.0, busy)[0]) if x] == [1, 3, 5, 7]
    assert policy.leaving(away, 100.0) == ([True] + [False] * 8, 92.0)
    assert not any(policy.leaving([False] * 9, 0.0)[0]), "all of them are on the device"


def test_what_was_read_last_leaves_first_and_no_more_than_is_needed() -> None:
    # The third layer is read next.
    layers = [LoggedCandidate(i, 0, 10, 0, used) for i, used in enumerate((8, 8, 7, 7))]
    found = WholeLayers().victims(layers, 15)
    assert [(x.candidate.layer, x.blocks) for x in found] == [(1, 10), (0, 5)]
    assert [(x.candidate.layer, x.blocks) for x in WholeLayers().victims(layers[::-1], 10)] == [(1, 10)]
    assert sum(x.blocks for x in WholeLayers().victims(layers, 100)) == 40


def test_of_caches_that_are_long_gone_no_phase_is_kept() -> None:
    layers = [LayerState(i, 1, 10 * (i < 7), 0, 10 * (i >= 7), 1, True) for i in range(9)]
    policy, state = WholeLayers(), StepState(1, layers, 0, 100, cache=0)
    policy.observe(StepRecord(1, 9, 9.0, bytes_up=10, seconds_up=2.0))  # a swap takes two computations of a layer

    def leaving(cache: int) -> list[int]:
        return [i for i, x in enumerate(policy.plan(replace(state, cache=cache)).layers) if x.leave]

    assert leaving(0) == [0, 2, 4, 6, 8]
    assert leaving(0) == [1, 3, 5, 7], "the last one still comes"
    assert leaving(0) == [0, 2, 4, 6, 8]
    for cache in range(1, CACHES + 1):
        leaving(cache)
    assert leaving(CACHES) == [1, 3, 5, 7]
    assert leaving(0) == [0, 2, 4, 6, 8]


def test_whole_layers_come_and_go(model: LlamaForCausalLM) -> None:
    cache = TieredKVCache(CONFIG, device_budget=50 * SLOT, block_size=SIZE, policy="pie")
    tokens(model, cache, prompt(1))
    layers = cache.residency().layers
    parts = [x.device_blocks for x in layers if 2 < x.device_blocks < x.tokens // SIZE]
    assert len(parts) <= 1, "one may be on its way, all others are here or there"
    assert cache.stats.promotions > 0.8 * cache.stats.block_fetches, "what came stays until its turn"
    assert cache.stats.host_blocks < 0.1 * cache.stats.block_fetches


# Neo


def state(rows: list[int], spilled: list[int], free: int) -> StepState:
    """Rows with so many bytes, in one layer with blocks of one byte."""
    resident = sum(rows) - sum(spilled)
    layer = LayerState(0, 1, resident, 0, sum(spilled), len(rows), True)
    return StepState(1, [layer], free, 800, row_bytes=rows, row_spilled=spilled)


def test_as_many_sequences_as_fit_are_on_the_device_and_none_in_parts() -> None:
    # Half of each is there: the first that fits, and what the next tokens take is kept free.
    assert WholeSequences().plan(state([200] * 4, [120] * 4, 250)).on_host == [2, 3]
    assert WholeSequences().plan(state([200] * 4, [0, 0, 200, 200], 50)).on_host == [2, 3]
    # Who was here stays though a larger one waits; who comes back leaves room, so as not to leave again soon.
    assert WholeSequences().plan(state([300, 200, 300], [0, 0, 300], 250)).on_host == [2]
    assert WholeSequences().plan(state([300, 200, 300], [0, 0, 300], 500)).on_host == []
    # Of those that wait the largest comes first.
    assert WholeSequences().plan(state([200, 300, 250], [200, 300, 250], 450)).on_host == [0, 2]
    # What the next tokens take is nobody's.
    assert WholeSequences().plan(state([200, 200], [0, 0], 1)).on_host == [1]


def sides(cache: TieredKVCache) -> list[set[bool]]:
    """For each row, where its sealed blocks are: True for the device."""
    found = []
    readers = list(cache._forward.readers.values())
    for row in range(len(readers[0].layer.rows)):
        runs = [run for x in readers for run in x.layer.rows[row].resolve() if run.sealed]
        found.append({run.state is not State.HOST for run in runs})
    return found


def test_every_sequence_is_on_one_side_and_comes_back_whole(model: LlamaForCausalLM) -> None:
    cache = TieredKVCache(CONFIG, device_budget=4 * 45 * SLOT, block_size=SIZE, policy="neo", write_through=0.0)
    tokens(model, cache, prompt(4))
    # Blocks sealed in the last step move with the next one.
    with torch.no_grad():
        model(torch.zeros(4, 1, dtype=torch.long), past_key_values=cache)
    there = sides(cache)
    assert there.count({True}) >= 1
    assert there.count({False}) >= 1
    assert all(len(x) == 1 for x in there)
    assert cache.stats.host_blocks
    cache.batch_select_indices(torch.tensor([i for i, x in enumerate(there) if x == {False}][:1]))
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert sides(cache) == [{True}], "there is room for it now"
    cache.check_integrity()


def test_in_the_simulator_too_sequences_are_on_one_side() -> None:
    load = Load(16, 2e-4, 4096 * 64, 64, 8192, 4, 16 * 4 * 8192 * 4096 * 6 // 10)
    trial = Simulation(WholeSequences(), Machine(Rates()), load)
    trial.run(30)
    for layer in trial._layers:
        blocks = (layer.resident + layer.spilled) // 4
        assert abs(layer.spilled - 2 * blocks) <= 4, "two of four fit"


# What plans can say


class Told(Policy):
    """Does as it is told."""

    def __init__(self, plan_of: Callable[[StepState], StepPlan]) -> None:
        super().__init__(write_through=0.0)
        self.plan_of = plan_of

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        return self.plan_of(state)


def told(plan_of: Callable[[StepState], StepPlan], **options: Any) -> TieredKVCache:
    """A cache whose steps are planned so."""
    return TieredKVCache(CONFIG, device_budget=70 * SLOT, block_size=SIZE, policy=Told(plan_of), **options)


def test_blocks_leave_after_use_as_many_as_planned_and_the_oldest_first(model: LlamaForCausalLM) -> None:
    seen: list[StepState] = []

    def plan_of(state: StepState) -> StepPlan:
        seen.append(state)
        return StepPlan([LayerPlan(leave=3 if x.layer == 1 else 0) for x in state.layers])

    cache = told(plan_of)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
        seen.clear()
        for _ in range(3):
            model(prompt(1, 1), past_key_values=cache)
    resident = [[x.resident for x in state.layers] for state in seen]
    assert [x[1] for x in resident] == [x - 3 * i for i, x in enumerate([resident[0][1]] * 3)]
    assert resident[0][2] == resident[2][2]
    runs = cache._forward.readers[1].layer.runs()
    places = [run.state is State.HOST for run in runs for _ in range(run.count) if run.sealed]
    assert places == sorted(places, reverse=True), "the oldest are on the host"
    cache.check_integrity()


def test_nobody_waits_for_a_block_without_a_copy_to_leave(model: LlamaForCausalLM) -> None:
    cache = told(lambda state: StepPlan([LayerPlan(leave=1000) for _ in state.layers]))
    cache._forward.memory.policy.write_back = lambda *args: 0  # type: ignore[method-assign]
    with_doubles(cache, held(0, 0.0))
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
        before = cache.stats
        model(prompt(1, 1), past_key_values=cache)
    after = cache.stats
    begun = (after.bytes_down - before.bytes_down) // SLOT
    assert begun > 3 * LAYERS, "copies have begun"
    assert after.evictions - before.evictions <= LAYERS, "only what new blocks took the place of has left"
    cache.check_integrity()


def test_a_copy_that_fails_leaves_the_block_where_it_is(model: LlamaForCausalLM) -> None:
    right = tokens(model, DynamicCache(config=CONFIG), prompt(1))
    calls = [0]

    def fails(transfer: Any) -> bool:
        calls[0] += 1
        return calls[0] % 3 == 0 and calls[0] > 30

    cache = told(lambda state: StepPlan([LayerPlan(leave=2) for _ in state.layers]))
    with_doubles(cache, failing(fails))
    assert tokens(model, cache, prompt(1)) == right
    cache.check_integrity()


@pytest.mark.parametrize("count", [0, 1, LAYERS + 1])
def test_a_plan_for_another_number_of_layers_is_refused_and_changes_nothing(
    count: int, model: LlamaForCausalLM
) -> None:
    plans = [Policy().plan, lambda state: StepPlan([LayerPlan() for _ in range(count)])]
    cache = told(lambda state: plans[0](state))
    with torch.no_grad():
        model(prompt(1, 61), past_key_values=cache)
        plans.reverse()
        with pytest.raises(ConfigError, match=f"{count} layers where {LAYERS}"):
            model(prompt(1, 1), past_key_values=cache)
        plans.reverse()
        assert cache.get_seq_length() in (61, 62)
        cache.check_integrity()
        cache.crop(0)
        cache.crop(61 - cache.get_seq_length())
        again = model(prompt(1, 1), past_key_values=cache).logits
        right = DynamicCache(config=CONFIG)
        model(prompt(1, 61), past_key_values=right)
        torch.testing.assert_close(again, model(prompt(1, 1), past_key_values=right).logits)


def test_rows_are_counted_once_where_they_share(model: LlamaForCausalLM) -> None:
    seen: list[StepState] = []

    class Asks(Policy):
        by_rows = True

        def plan(self, state: StepState) -> StepPlan:
            seen.append(state)
            return super().plan(state)

    cache = TieredKVCache(CONFIG, device_budget=60 * SLOT, block_size=SIZE, policy=Asks())
    with torch.no_grad():
        model(prompt(1, 40).repeat(3, 1), past_key_values=cache)
        model(prompt(3, 1), past_key_values=cache)
        seen.clear()
        for i in range(4):
            model(prompt(3, 1) + i, past_key_values=cache)
    for found in seen:
        assert sum(found.row_bytes) == sum((x.resident + x.spilled) * x.block_bytes for x in found.layers)
        assert sum(found.row_spilled) == sum((x.spilled - x.fetched) * x.block_bytes for x in found.layers)
        assert found.row_bytes[0] >= found.row_bytes[1], "what they share is the first one's"


def test_a_policy_cannot_evict_what_it_was_not_offered(model: LlamaForCausalLM) -> None:
    cache = TieredKVCache(CONFIG, device_budget=200 * SLOT, block_size=SIZE)
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)
    memory, read = cache._forward.memory, cache._forward.readers[1].layer.blocks
    memory.policy.victims = lambda candidates, blocks: [Victims(read, 3), Victims(candidates[0], 2)]  # type: ignore
    with memory.lock:
        memory.devices[0].eviction.policy.victims = memory.policy.victims  # type: ignore[method-assign]
        before = read.evictable
        assert memory.devices[0].eviction.evict(read.pools, 4, keep=read) == 2
        assert read.evictable == before, "it is being read"
