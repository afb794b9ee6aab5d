"""A fetch that begins enough layers before its use hides behind their compute: an unmodified model, a simulated clock.

A layer computes for one second. The link takes three for the blocks of one layer that are on the host. So a fetch that
begins k layers ahead leaves 3 - k seconds in which the device waits, as long as it begins behind nothing but the last
readers of the slots that it writes into.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from conversations import Patch, edit
from timed import TimedTransfers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import Policy, TieredKVCache
from kvtier.attention.reader import LayerReader
from kvtier.forward.forward import Forward
from kvtier.memory.tiers.fetching import Fetching
from kvtier.planning.step import StepPlan, StepRecord, StepState
from kvtier.testing import with_doubles

LAYERS, BLOCK, BLOCKS, STEPS = 12, 16, 6, 10
#: Layers whose full blocks are all on the host: seldom enough for the link, three seconds of every four.
SPILLED = (3, 7, 11)
LINK = 3.0


class Ahead(Policy):
    """Fetches so many layers ahead of their use, and keeps nothing of it."""

    def __init__(self, ahead: int) -> None:
        super().__init__(ahead=ahead)
        self.stalls: list[float] = []

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        return 0

    def plan(self, state: StepState) -> StepPlan:
        plan = super().plan(state)
        for layer in plan.layers:
            layer.keep = 0
        plan.reserve = 0
        return plan

    def observe(self, record: StepRecord) -> None:
        self.stalls.append(record.stall_seconds)


@functools.cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def decode(cache: object, after: Callable[[int], None] = lambda step: None) -> list[int]:
    """Greedy tokens after a prompt; no step fills a block."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (1, BLOCKS * BLOCK + 1))
    tokens: list[int] = []
    for step in range(STEPS + 1):
        logits = model()(input_ids=ids, past_key_values=cache).logits
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        after(step)
    return tokens


@functools.cache
def expected() -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(decode(DynamicCache(config=model().config)))


def timed(ahead: int, *, room: int = BLOCKS, lead: float = 0.0) -> tuple[list[float], TimedTransfers]:
    """What each decode step stalled, in seconds, and the engine.

    Args:
        ahead: layers ahead of its use at which a fetch may begin.
        room: blocks that the device has room for beside what is there.
        lead: seconds that the CPU runs ahead.
    """
    engine = TimedTransfers(torch.device("cpu"), lead=lead)
    policy = Ahead(ahead)
    cache = TieredKVCache(
        model().config,
        device_budget=2**20,
        host_budget=2**20,
        block_size=BLOCK,
        host_attention=False,
        policy=policy,
    )
    with_doubles(cache, lambda device: engine, poison=False)
    forward = cache._forward

    def after(step: int) -> None:
        engine.catch_up()
        if step == 1:  # by then everything has its memory
            spill(forward, engine, room)

    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_: engine.compute(1.0)) for layer in model().model.layers
    ]
    try:
        with torch.no_grad():
            tokens = decode(cache, after)
    finally:
        for hook in hooks:
            hook.remove()
    assert tuple(tokens) == expected()
    for i, reader in forward.readers.items():
        blocks = reader.layer.blocks
        assert blocks.spilled + blocks.transient == (BLOCKS if i in SPILLED else 0), "what was fetched leaves again"
    assert forward._before is not None
    forward._observe(forward._before, 0.0)  # the last step
    assert engine.busy == pytest.approx(LINK * len(SPILLED) * len(policy.stalls), abs=LINK), "nothing is fetched twice"
    return policy.stalls, engine


def spill(forward: Forward, engine: TimedTransfers, room: int) -> None:
    """Let the full blocks of the chosen layers leave; of what is free then, leave the device so many blocks."""
    with forward.memory.lock:
        (device,) = forward.memory.devices
        pools = forward.readers[0].layer.blocks.pools
        assert pools.device is not None
        assert device.slabs is not None
        for i in SPILLED:
            device.evict_from(forward.readers[i].layer.blocks, BLOCKS)
        engine.drain()
        device.poll()
        while pools.device.free > room:
            assert pools.device.take(pools.device.free - room) is not None
        device.slabs.resize(device.slabs.budget.used)
        engine.seconds_per_byte = LINK / (BLOCKS * pools.layout.nbytes)
    engine.stalls = engine.busy = 0.0


def steady(stalls: list[float]) -> list[float]:
    """Steps behind the first: that one's fetches begin with it."""
    return [round(x, 3) for x in stalls[1:]]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 4])
def test_each_layer_that_a_fetch_begins_earlier_hides_a_layer_of_it(ahead: int) -> None:
    stalls, engine = timed(ahead)
    assert len(stalls) == STEPS - 1
    assert steady(stalls) == [len(SPILLED) * max(LINK - ahead, 0.0)] * (STEPS - 2)
    assert engine.stalls == pytest.approx(sum(stalls), abs=0.01), "and that is what policies are told"


def test_with_enough_depth_stalls_vanish_and_with_one_layer_they_do_not() -> None:
    one, enough = timed(1)[0], timed(3)[0]
    assert steady(enough) == [0.0] * len(steady(enough))
    assert min(steady(one)) == 6.0


@pytest.mark.parametrize("ahead", [3, 4, 6])
def test_without_room_for_the_blocks_no_depth_hides_all_of_a_fetch(ahead: int) -> None:
    stalls, _ = timed(ahead, room=BLOCKS // 2)
    assert min(steady(stalls)) > 3.0


@pytest.mark.parametrize("precise", [True, False])
def test_where_the_cpu_runs_ahead_a_fetch_waits_for_the_last_readers_of_its_slots_alone(
    precise: bool, monkeypatch: Patch
) -> None:
    """The slots were read four layers before: a fetch that is submitted late begins as early as on time."""
    if not precise:
        edit(Fetching, "fetch", "behind if self._tier.engine.asynchronous else None", "None")(monkeypatch)
    stalls, _ = timed(1, lead=math.inf)
    assert steady(stalls) == [0.0 if precise else 6.0] * len(steady(stalls))


def test_blocks_on_their_way_are_waited_for_and_not_fetched_again(monkeypatch: Patch) -> None:
    edit(LayerReader, "portions", "self.retire(read)", "self.retire()")(monkeypatch)
    with pytest.raises(AssertionError, match="fetched twice"):
        timed(3)
