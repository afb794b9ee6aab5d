"""An unmodified model over a link and a device of a given speed: the tokens of DynamicCache, and no step too short."""

from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvtier
from kvtier import Policy, TieredKVCache
from kvtier.errors import ConfigError
from kvtier.memory import measured
from kvtier.planning.rates import Rates
from kvtier.planning.reports.trace import busy_seconds, read_trace
from kvtier.planning.step import StepRecord
from kvtier.testing import Throttled, emulated_device, throttled, with_doubles
from tests.planning.traces import problems

LAYERS, PROMPT, NEW, BLOCK = 4, 100, 12, 8
LINEAR = 0.002


@functools.cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def tokens(cache: Any, **options: Any) -> list[int]:
    ids = torch.randint(0, 64, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    found = model().generate(
        ids, attention_mask=seen, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    return found[0, PROMPT:].tolist()


@functools.cache
def expected() -> list[int]:
    return tokens(DynamicCache(config=model().config))


class Steps:
    """A streamer that looks at the clock, and does something at one of the tokens."""

    def __init__(self, at: int = 0, act: Any = None) -> None:
        self.times: list[float] = []
        self._at, self._act = at, act

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == self._at:
            self._act()

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        """Of each step of one token."""
        return [b - a for a, b in itertools.pairwise(self.times[1:])]


class Recorded(Policy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[StepRecord] = []

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def cache_on(machine: Throttled, policy: Any = None, *, budget: int = 24_000) -> TieredKVCache:
    return with_doubles(
        TieredKVCache(model().config, device_budget=budget, host_budget=2**20, block_size=BLOCK, policy=policy), machine
    )


@pytest.mark.parametrize("policy", ["default", "adaptive", "all-attend", "all-fetch"])
@pytest.mark.parametrize("link", [1e6, 50e6])
def test_any_policy_gives_the_tokens_of_dynamic_cache(policy: str, link: float) -> None:
    machine = throttled(link, latency=1e-4, poison=True)
    cache = cache_on(machine, policy)
    steps = Steps(at=6, act=lambda: setattr(machine.link, "up", 5e6))
    with emulated_device(model(), machine, linear=LINEAR, device_rate=1e9):
        assert tokens(cache, streamer=steps) == expected()
    cache.check_integrity()
    assert cache.stats.host.used_blocks
    assert len(steps.seconds) == NEW - 1
    # A streamer is told of a token when the forward that made it has ended.
    assert min(steps.seconds) >= LAYERS * LINEAR
    if policy == "all-fetch":
        assert cache.stats.bytes_up
    elif policy == "all-attend":
        assert cache.stats.host_bytes
    cache.close()


@pytest.mark.parametrize(("host", "device"), [(1e6, math.inf), (None, 5e5)])
def test_attention_takes_the_time_of_the_bytes_where_it_is(host: float | None, device: float) -> None:
    """A step is no shorter than what the device's bytes take, or the host's, and the rest of the model."""
    machine = throttled(50e6, host=host)
    policy = Recorded()
    cache = cache_on(machine, policy)
    steps = Steps()
    with emulated_device(model(), machine, linear=LINEAR, device_rate=device) as clock:
        tokens(cache, streamer=steps)
        busy = clock.busy
    records = [x for x in policy.records if x.tokens == 1]
    assert len(records) > NEW // 2
    for record in records:
        assert record.host_bytes
        assert record.host_seconds >= record.host_bytes / (host or math.inf) * 0.999
    block = cache._forward.readers[0].layer.layout.nbytes
    # Of each layer a block more or less, for one may just have been filled.
    on_device = (sum(x.device_blocks for x in cache.residency().layers) - LAYERS) * block
    on_host = records[-1].host_bytes - LAYERS * block
    assert on_device > LAYERS * block
    assert on_host > LAYERS * block
    least = LAYERS * LINEAR + max(on_device / device, on_host / (host or math.inf))
    assert min(steps.seconds[-3:]) >= least
    assert busy >= (NEW - 1) * LAYERS * LINEAR
    cache.close()


@pytest.mark.parametrize("policy", ["all-fetch", "adaptive"])
def test_a_trace_shows_the_link_and_the_device_at_their_speed(policy: str, tmp_path: Path) -> None:
    rate = 2e6
    machine = throttled(rate)
    cache = cache_on(machine, policy)
    with kvtier.trace(tmp_path / "x.json"), emulated_device(model(), machine, linear=LINEAR, device_rate=1e7) as clock:
        tokens(cache)
        busy = clock.busy
    stats = cache.stats
    cache.close()
    assert problems(tmp_path / "x.json") == []
    events = read_trace(tmp_path / "x.json")
    fetches = [x for x in events if x.lane == "up"]
    assert sum(x.args["bytes"] for x in fetches) == stats.bytes_up > 0
    assert busy_seconds(events, "up") >= stats.bytes_up / rate * 0.99
    for a, b in itertools.pairwise(sorted(fetches, key=lambda x: x.start)):
        assert a.end <= b.start + 1e-6, "one after the other"
    if policy == "all-fetch":
        assert busy_seconds(events, "stall") > 0, "the link takes longer than the device"
    # The last step's end is not seen, nor its last layer.
    assert busy_seconds(events, "compute") >= busy * 0.8


def test_the_device_goes_on_while_the_cpu_is_free() -> None:
    """What the CPU does in the time of a layer adds nothing: it is given to the clock before."""
    machine = throttled(50e6)
    cache = cache_on(machine, budget=2**20)
    with emulated_device(model(), machine, linear=0.02) as clock:
        ids = torch.ones(1, 1, dtype=torch.long)
        with torch.no_grad():
            before = time.perf_counter()
            model().model(input_ids=ids, past_key_values=cache)  # what is hooked is the whole model: nobody waits here
            launched = time.perf_counter()
            assert clock.ends >= before + LAYERS * 0.02
            if launched < before + 0.02:  # this thread had not to wait for others
                assert clock.idle < 0.02
            cache.reset()
            model()(input_ids=ids, past_key_values=cache)
            assert time.perf_counter() >= before + 2 * LAYERS * 0.02
    cache.close()


def test_outside_the_block_nothing_of_it_is_left() -> None:
    machine = throttled(1e9)

    def fail() -> None:
        with emulated_device(model(), machine, linear=3600.0) as clock:
            assert clock.running
            with pytest.raises(ConfigError, match="already"), emulated_device(model(), machine, linear=0.0):
                pass
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert not machine.clock.running
    assert not any(x._forward_pre_hooks or x._forward_hooks for x in model().modules())
    cache = cache_on(machine)
    assert tokens(cache) == expected()
    cache.close()


@pytest.mark.parametrize(
    "wrong",
    [{"linear": -1.0}, {"linear": "2ms"}, {"linear": 0.0, "device_rate": 0.0}, {"linear": 0, "device_rate": ""}],
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError), emulated_device(model(), throttled(1e9), **wrong):
        pass
    with (
        pytest.raises(ConfigError, match="layer_idx"),
        emulated_device(torch.nn.Linear(1, 1), throttled(1e9), linear=0.0),
    ):
        pass


def test_the_emulated_machine_has_rates_of_its_own_and_not_the_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rates(up=37.3e9, down=37.1e9, host=60e9, measured=True)
    monkeypatch.setattr(measured, "rates", lambda device, layout: real)
    machine = throttled("2GB", "1GB", 50e-6, host="5GB")
    with cache_on(machine) as cache, emulated_device(model(), machine, linear=0.0, device_rate=80e9):
        tokens(cache)
        (known,) = cache._forward.memory.rates.values()
        said = " ".join(str(cache.explain()).split())
    assert known == replace(real, up=2e9, down=1e9, copy_overhead=50e-6, host=5e9, device=80e9, measured=False)
    assert "37.3 GB/s" not in said
    assert "estimates, not measured: " in said
    assert throttled(math.inf).rates(None).up == 1e15, "a rate that Rates takes"
