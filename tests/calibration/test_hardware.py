"""On a machine without CUDA, links, host attention and a model are measured for real, stored, and used."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from settled import only
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvtier
from kvtier import profile
from kvtier.calibration import hardware
from kvtier.calibration.measurements import attention, link
from kvtier.calibration.measurements import model as models
from kvtier.calibration.measurements.link import share_kept
from kvtier.cpu import native
from kvtier.errors import ConfigError
from kvtier.hf.models.checkpoint.config import completed
from kvtier.kernels import launch
from kvtier.memory import measured
from kvtier.memory.storage.layout import BlockLayout
from kvtier.planning.hardware.model_size import model_size
from kvtier.planning.hardware.predictors import Linear, PrefillSize
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.outlook import Demand, foresee

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    dtype="float32",
)
LAYOUT = BlockLayout(2, 2, 8, 8, 64, torch.float32)
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not compiled")


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are measured in moments."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(link, "sizes", lambda smallest, largest: [2**14, 2**16, 2**17, 2**18])
    monkeypatch.setattr(attention.Blocks, "sizes", lambda self, most: [1, 2, 4, 8])
    monkeypatch.setattr(attention, "ARENA", 2**21)
    for name in ("LINK", "HOST", "LINEAR", "PREFILL"):
        monkeypatch.setattr(hardware, name, 0.003)


@needs_native
def test_a_model_on_a_cpu_is_calibrated_in_moments_and_stored(
    model: LlamaForCausalLM, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.inference_mode():
        found = kvtier.calibrate(model)
    assert found.failures == found.skipped == ()
    assert found.profile.measured == {"up", "down", "together", "host", "device", "linear", "prefill"}
    assert found.profile.rates().measured
    assert found.path is not None
    assert found.path.parent == folder
    assert [x.name for x in found.measurements] == [
        measured.LINK,
        measured.host_name(LAYOUT),
        measured.model_name(model.config),
    ]
    # Of so short a measurement another line may say that something disturbed it.
    lines = [x for x in capsys.readouterr().err.splitlines() if "was disturbed" not in x]
    assert len(lines) == len(found.measurements)
    assert "GB/s" in lines[0]
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers are what they were"
    assert torch.get_num_threads() == threads
    assert HardwareProfile.from_json(found.profile.to_json()) == found.profile
    # A later process finds the same.
    assert measured.hardware(CPU, LAYOUT, measured.model_name(CONFIG)) == found.profile


@needs_native
def test_without_a_model_the_machine_alone_is_measured() -> None:
    found = kvtier.calibrate(CONFIG, progress=False)
    assert found.profile.measured == {"up", "down", "together", "host", "device"}
    assert found.profile.linear is found.profile.prefill is None


def test_a_model_elsewhere_is_an_error(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="The model is on cpu"):
        kvtier.calibrate(model, device="cuda:0", progress=False)


def test_no_time_is_an_error() -> None:
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="seconds="):
            kvtier.calibrate(seconds=seconds, progress=False)


@needs_native
def test_a_model_that_cannot_be_timed_is_a_failure_and_the_machine_is_measured(model: LlamaForCausalLM) -> None:
    model.config.is_encoder_decoder = True
    found = kvtier.calibrate(model, progress=False)
    assert len(found.failures) == 1
    assert "no decoder" in found.failures[0]
    assert {"up", "host"} <= found.profile.measured


@needs_native
def test_measuring_gives_all_memory_and_all_threads_back(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "thread_counts", lambda: [1])
    before = threading.enumerate()
    trial = models.Trial(model)
    try:
        assert len(models.measure_linear(trial, 0.2)) >= 1
        sizes = models.measure_prefill(trial, 0.2)
        assert all(x.new + x.past <= 512 for x, _ in sizes)
        caches = list(trial._caches.values())
        assert caches
    finally:
        trial.close()
    assert all(cache.stats.host.bytes == 0 for cache in caches)
    link.measure(CPU, 0.1)
    torch.set_num_threads(2)
    found = attention.measure_host(LAYOUT, 2, CPU, 0.2, nbytes=2**20)
    assert list(found.threads) == [1]
    assert torch.get_num_threads() == 2, "as many as before"
    assert only(before)


def test_copies_that_fail_do_not_pass_for_a_busy_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("the link is gone")

    monkeypatch.setattr(link.Arena, "call", lambda *args: fails)
    with pytest.raises(OSError, match="the link is gone"):
        attention.measure_host(LAYOUT, 2, CPU, 0.2, nbytes=2**20)


def test_what_a_busy_link_takes_is_no_change_of_the_machines_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, busy = [1.0], [False]

    def timed(calls: Any, seconds: float) -> list[float]:
        speed[0] *= 1.2  # slower with each measurement, as a processor that gets warm
        return [speed[0] * (1.25 if busy[0] else 1.0)]

    def busy_copies(arena: link.Arena, nbytes: int) -> tuple[Any, Any]:
        return lambda: busy.__setitem__(0, True), lambda: busy.__setitem__(0, False)

    monkeypatch.setattr(attention, "in_turn", timed)
    monkeypatch.setattr(link, "busy_copies", busy_copies)
    blocks = attention.Blocks(LAYOUT, 2, 2**20)
    try:
        lost = attention._lost(blocks, CPU, [1, 2], 1.0)
    finally:
        blocks.close()
    assert lost == pytest.approx(1 - 1 / 1.25, abs=0.03)
    assert not busy[0]


def test_a_forward_that_is_timed_leaves_its_cache_as_it_was(model: LlamaForCausalLM) -> None:
    trial = models.Trial(model)
    try:
        for size in (PrefillSize(24), PrefillSize(24, 64), PrefillSize(24, 64, 2)):
            forward, cut_back = trial.calls(size)
            cache = list(trial._caches.values())[-1]
            for _ in range(3):
                assert cache.get_seq_length() == size.past
                with torch.no_grad():
                    forward()
                assert cache.get_seq_length() == size.past + size.new
                cut_back()
            assert cache.get_seq_length() == size.past
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("kind", "sizes", "refills"),
    [
        ("gemma3_text", {"sliding_window": 16, "head_dim": 8}, False),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 2}, True),
    ],
)
def test_windows_and_states_are_as_they_were_too(kind: str, sizes: dict[str, Any], refills: bool) -> None:
    torch.manual_seed(0)
    common = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    some = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **heads, **sizes)).eval()
    seen = list[torch.Tensor]()
    some.register_forward_hook(lambda _, args, out: seen.append(out.logits) if args[0].shape[1] == 8 else None)
    trial = models.Trial(some)
    try:
        with torch.no_grad():
            forward, cut_back = trial.calls(PrefillSize(8, 24))
            for _ in range(3):
                forward()
                cut_back()
            assert len(models.measure_linear(trial, 0.1)) >= 1
    finally:
        trial.close()
    assert trial.refills is refills
    for x in seen[1:3]:
        torch.testing.assert_close(x, seen[0])


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {}),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("mistral", {"sliding_window": 16}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 2}),
    ],
)
def test_a_step_is_planned_to_take_what_was_measured_whatever_its_layers_keep(
    kind: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_times", lambda made, seconds: [3.0] * len(made))
    common = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    some = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **heads, **sizes)).eval()
    trial = models.Trial(some)
    try:
        with torch.no_grad():
            linear = Linear.fit(models.measure_linear(trial, 0.1))
    finally:
        trial.close()
    size = model_size(completed(some.config.to_dict())[0])
    machine = HardwareProfile.estimate("h100", size)
    planned = [
        foresee(size, profile, Demand(1, 1, 2**30, 2**30)).speeds[0].seconds
        for profile in (machine, machine.with_part("linear", linear))
    ]
    assert planned[1] == pytest.approx(3.0, abs=planned[0])


def test_a_model_that_is_filled_again_has_time_for_fewer_sizes(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_times", lambda made, seconds: [1.0] * len(made))
    now, found = [0.0], list[int]()
    monkeypatch.setattr(models.time, "perf_counter", lambda: now[0])

    def forward(self: models.Trial, tokens: torch.Tensor, cache: kvtier.TieredKVCache) -> None:
        now[0] += tokens.numel() * 1e-3
        cache.update(*[torch.zeros(tokens.shape[0], 2, tokens.shape[1], 8)] * 2, 0)

    monkeypatch.setattr(models.Trial, "_forward", forward)
    for refills in (False, True):
        trial = models.Trial(model)
        trial.refills = refills
        sizes = [x for x, _ in models.measure_prefill(trial, 10.0)]
        found.append(len(sizes))
        trial.close()
    assert sum(x.new + x.past for x in sizes) * 1e-3 <= models._ROUND * 10.0
    assert found[1] < found[0]


def test_sizes_too_large_for_the_time_or_the_model_are_left_away(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(models.time, "perf_counter", lambda: now[0])
    timed: list[int] = []

    def times(made: Any, seconds: float) -> list[float]:
        timed.append(len(made))
        return [1.0] * len(made)

    def forward(self: models.Trial, tokens: torch.Tensor, cache: kvtier.TieredKVCache) -> None:
        now[0] += tokens.numel() * 1e-3
        cache.update(*[torch.zeros(tokens.shape[0], 2, tokens.shape[1], 8)] * 2, 0)
        cache.update(*[torch.zeros(tokens.shape[0], 2, tokens.shape[1], 8)] * 2, 1)

    monkeypatch.setattr(models, "_times", times)
    monkeypatch.setattr(models.Trial, "_forward", forward)
    trial = models.Trial(model)
    try:
        found = models.measure_prefill(trial, 1.0, new=(32, 64, 128, 256, 512), past=(0,))
        assert [x.new for x, _ in found] == [32], "a tenth of the time is the most that one forward may take"
        found = models.measure_prefill(trial, 100.0, new=(32, 64, 128, 256, 512, 1024), past=(0, 64, 4096))
        assert max(x.new + x.past for x, _ in found) == 512, "the model has no more positions"
        every = [x for x, _ in models.measure_prefill(trial, 50.0)]
        some = [x for x, _ in models.measure_prefill(trial, 10.0)]
        assert models._FEWEST < len(some) < len(every)
        assert (some[0], some[-1]) == (every[0], every[-1]), "of all works"
        assert sum(x.new for x in some) * 1e-3 <= models._ROUND * 10.0
        few = [x for x, _ in models.measure_prefill(trial, 5.0)]
        assert len(few) == models._FEWEST == len(set(few)), "a fit of fewer sizes says little"
    finally:
        trial.close()


@pytest.mark.parametrize(
    ("up", "down", "together", "share"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 1.0, 2.0, 0.5),
        (2.0, 1.0, 2.0, 1.0),
        (2.0, 1.0, 3.0, 0.5),
        (1.0, 1.0, 0.9, 1.0),
        (1.0, 1.0, 100.0, 0.05),
    ],
)
def test_what_each_direction_keeps_follows_from_three_times(
    up: float, down: float, together: float, share: float
) -> None:
    assert share_kept(up, down, together) == pytest.approx(share)


# What is stored is used


def spill(policy: Any) -> kvtier.TieredKVCache:
    cache = kvtier.TieredKVCache(device_budget=12 * LAYOUT.nbytes, host_budget=2**24, block_size=64, policy=policy)
    for _ in range(12):
        for layer in range(2):
            cache.update(*[torch.zeros(1, 2, 64, 8)] * 2, layer)
    return cache


def stored(**parts: Any) -> None:
    made = HardwareProfile.estimate("cpu")
    for part, value in parts.items():
        made = made.with_part(part, value, 0.01)
    for name, some in ((measured.LINK, ("up", "down")), (measured.host_name(LAYOUT), ("host",))):
        profile.store(launch.machine(CPU), name, {x: made.part_as_json(x) for x in some if x in parts})


def test_an_adaptive_cache_begins_with_what_is_stored() -> None:
    from kvtier.planning.hardware.predictors import Curve

    stored(up=Curve.straight(1e-5, 7e9), down=Curve.straight(1e-5, 3e9))
    policy = Adaptive()
    with spill(policy):
        pass
    found = policy._stored["cpu"]
    assert found.up == pytest.approx(7e9, rel=0.01)
    assert found.down == pytest.approx(3e9, rel=0.01)
    assert not found.measured, "of the host nothing is stored"


@pytest.mark.parametrize("damage", ["nothing", "{", '{"machine": "another one", "values": {}}', "[]"])
def test_without_a_profile_of_this_machine_estimates_serve(damage: str) -> None:
    from kvtier.planning.hardware.predictors import Curve

    if damage != "nothing":
        stored(up=Curve.straight(1e-5, 7e9))
        profile.file_of(launch.machine(CPU)).write_text(damage)
    policy = Adaptive()
    with spill(policy):
        pass
    assert policy._stored == {}
    assert policy.rates == Rates()
    assert not measured.hardware(CPU, LAYOUT).measured


@pytest.mark.parametrize("budget", [None, 12 * LAYOUT.nbytes])
def test_a_wrong_setting_is_an_error_before_anything_changes(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profile.VARIABLE, "here")
    with kvtier.TieredKVCache(device_budget=budget, host_budget=2**24, policy="adaptive") as cache:
        with pytest.raises(ConfigError, match="KVTIER_PROFILE"):
            cache.update(*[torch.zeros(1, 2, 64, 8)] * 2, 0)
        assert cache.get_seq_length() == 0


def test_another_shape_finds_what_was_measured_last_and_its_own_comes_first() -> None:
    from kvtier.planning.hardware.predictors import Curve, HostAttention

    machine, other = launch.machine(CPU), BlockLayout(4, 4, 16, 16, 64, torch.bfloat16)
    made = HardwareProfile.estimate("cpu")
    for name, rate in ((measured.HOST, 1e9), (measured.host_name(LAYOUT), 2e9)):
        one = made.with_part("host", HostAttention(((1, Curve.straight(0.0, rate)),)))
        profile.store(machine, name, {"host": one.part_as_json("host")})
    assert measured.hardware(CPU, LAYOUT).host.seconds(2e9) == pytest.approx(1.0, rel=0.01)
    assert measured.hardware(CPU, other).host.seconds(2e9) == pytest.approx(2.0, rel=0.01)
    assert measured.hardware(CPU).host.seconds(2e9) == pytest.approx(2.0, rel=0.01)


def test_names_say_what_the_values_depend_on() -> None:
    names = {
        measured.host_name(LAYOUT),
        measured.host_name(BlockLayout(2, 2, 8, 8, 16, torch.float32)),
        measured.host_name(BlockLayout(2, 2, 8, 8, 64, torch.bfloat16)),
        measured.host_name(BlockLayout(2, 2, 8, 16, 64, torch.float32)),
        measured.host_name(BlockLayout(4, 4, 8, 8, 64, torch.float32)),
    }
    assert len(names) == 5
    assert measured.model_name(CONFIG) != measured.model_name(LlamaConfig(**(CONFIG.to_dict() | {"hidden_size": 64})))


def test_a_forward_measures_nothing_even_with_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, torch, kvtier;"
        "cache = kvtier.TieredKVCache(device_budget=2**17, host_budget=2**22, block_size=64, policy='adaptive');"
        "k = torch.zeros(1, 2, 64, 8);"
        "[cache.update(k, k, layer) for _ in range(24) for layer in range(2)];"
        "print(cache.stats.device.bytes > 0, [m for m in sys.modules if 'calibration' in m])"
    )
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path))
    done = forks.run(code)
    assert done.stdout == "True []\n", done.stderr
    assert not list(tmp_path.iterdir()), "and writes nothing"


def test_blocks_too_large_for_memory_are_a_failure_that_says_so() -> None:
    layout = BlockLayout(8, 8, 128, 128, 10**8, torch.bfloat16)
    with pytest.raises(kvtier.KVTierError, match="too large to be measured"):
        attention.measure_host(layout, 4, torch.device("cpu"), 1.0)


def test_without_the_native_library_attention_on_the_host_is_a_failure_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(kvtier.KVTierError, match="native library is not used"):
        attention.measure_host(LAYOUT, 2, CPU, 0.2, nbytes=2**20)
