"""A profile goes to JSON and back, says what of it was measured, and is what the planner begins with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.planning.hardware import machines
from kvtier.planning.hardware.machines import MACHINES, ModelSize, machine_like
from kvtier.planning.hardware.predictors import Curve, HostAttention, Linear, Prefill
from kvtier.planning.hardware.profile import PARTS, HardwareProfile
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.rates import Rates
from kvtier.planning.step import LayerState, StepState

# Llama 3.1 8B.
LLAMA = ModelSize(32, 4096, 32, 128, 8, 8_030_000_000, 8_030_000_000)


@pytest.fixture
def measured() -> HardwareProfile:
    host = HostAttention(((1, Curve.straight(2e-5, 1e10)), (2, Curve.straight(3e-5, 2e10))), lost=0.25, round_trip=7e-5)
    profile = HardwareProfile.estimate("a100").with_part("up", Curve.straight(1e-5, 2e10), 0.02)
    profile = profile.with_part("down", Curve.straight(1e-5, 1.5e10), 0.03).with_part("host", host, 0.04)
    return profile.with_part("prefill", Prefill(1e-3, 2e-5, 3e-10, 4e-10), None).with_part(
        "linear", Linear(((1.0, 1e-4),))
    )


def test_a_profile_comes_back_from_json_as_it_was(measured: HardwareProfile) -> None:
    for profile in (measured, HardwareProfile.estimate("cpu"), HardwareProfile.estimate("h100", LLAMA)):
        assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"parts": {}},
        {"parts": 3},
        {"measured": ["up", "magic"]},
        {"name": 4},
        {"measured": None},
    ],
    ids=str,
)
def test_what_is_no_profile_is_one_error(change: dict[str, Any], measured: HardwareProfile) -> None:
    with pytest.raises(ConfigError, match="no hardware profile"):
        HardwareProfile.from_json(json.dumps(json.loads(measured.to_json()) | change))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 2}', "[" * 100000, b"\xff\xfe\xfd"])
def test_damaged_text_is_one_error(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="no hardware profile"):
        HardwareProfile.from_json(text)


@pytest.mark.parametrize("part", list(PARTS))
def test_a_damaged_part_is_an_error_in_a_file_and_left_out_of_what_is_stored(part: str) -> None:
    profile = HardwareProfile.estimate("l40s", LLAMA)
    for damaged in (None, "x", {}, {"knots": [[1, -1]]}, -1, float("nan"), {"threads": [[0, {}]]}, 2.0):
        stored = {part: {"value": damaged, "error": None}}
        assert profile.with_stored(stored) == profile, damaged
        content = json.loads(profile.to_json())
        content["parts"][part]["value"] = damaged
        with pytest.raises(ConfigError):
            HardwareProfile.from_json(json.dumps(content))


@pytest.mark.parametrize("seconds", [1e-29, 1e30, 1e300, 5e-324])
@pytest.mark.parametrize("part", ["up", "down", "host", "device"])
def test_rates_that_no_machine_has_are_damage(part: str, seconds: float) -> None:
    profile = HardwareProfile.estimate("l40s", LLAMA)
    curve = {"knots": [[1e6, seconds], [2e6, 2 * seconds]]}
    content = json.loads(profile.to_json())
    value = content["parts"][part]["value"]
    stored = {part: {"value": value | {"threads": [[1, curve]]} if part == "host" else curve, "error": None}}
    assert profile.with_stored(stored) == profile
    content["parts"] |= stored
    with pytest.raises(ConfigError, match="no hardware profile"):
        HardwareProfile.from_json(json.dumps(content))


def test_stored_parts_replace_estimates_one_by_one(measured: HardwareProfile) -> None:
    stored = {part: measured.part_as_json(part) for part in ("up", "host")}
    damaged = {"down": {"value": {"knots": []}}, "magic": {"value": 3}, 4: {}, "prefill": 7}
    found = HardwareProfile.estimate("a100").with_stored(json.loads(json.dumps(stored)) | damaged)
    assert (found.up, found.host) == (measured.up, measured.host)
    assert found.down == HardwareProfile.estimate("a100").down
    assert found.measured == {"up", "host"}
    assert found.errors == {"up": 0.02, "host": 0.04}
    assert not found.rates().measured, "the rate of the way down is an estimate"
    for nothing in (None, 3, "x", [], {}):
        assert found.with_stored(nothing) == found


@pytest.mark.parametrize("part", ["up", "down", "device", "host"])
@pytest.mark.parametrize("knots", [[[0, 1e-5], [1e9, 1e-5]], [[0, 0], [1, 5e-324]]], ids=["flat", "next to nothing"])
def test_a_stored_part_that_says_what_no_machine_does_is_left_out(part: str, knots: list[list[float]]) -> None:
    estimate = HardwareProfile.estimate("a100")
    value: dict[str, Any] = {"knots": knots}
    if part == "host":
        value = {"threads": [[1, value]], "queries": [[1, 1]], "lost": 0.2, "round_trip": 0.0}
    found = estimate.with_stored({part: {"value": value, "error": None}})
    assert found == estimate
    assert found.rates() == estimate.rates()


def test_more_threads_than_were_measured_are_an_estimate() -> None:
    found = HardwareProfile.estimate("a100")
    host = HostAttention(((1, Curve.straight(2e-5, 8e9)), (4, Curve.straight(2e-5, 30e9))))
    for part, value in (("up", found.up), ("down", found.down), ("host", host)):
        found = found.with_part(part, value)
    assert [found.rates(n).measured for n in (None, 1, 3, 4, 5, 32)] == [True, True, True, True, False, False]


def test_it_says_what_was_measured_and_how_well(measured: HardwareProfile) -> None:
    said = str(measured)
    assert "up measured, error 2.0%" in said
    assert "device estimated" in said
    assert "prefill measured;" in said + ";"


def test_the_planner_begins_with_the_measured_rates(measured: HardwareProfile) -> None:
    rates = measured.rates()
    assert rates.up == pytest.approx(2e10, rel=0.01)
    assert rates.down == pytest.approx(1.5e10, rel=0.01)
    assert rates.host == pytest.approx(2e10, rel=0.01)
    assert measured.rates(threads=1).host == pytest.approx(1e10, rel=0.01)
    assert rates.shared == 0.25
    assert rates.host_overhead >= 7e-5, "the query's way to the host counts"
    assert rates.measured
    assert not HardwareProfile.estimate("a100").rates().measured


def test_adaptive_prices_with_what_is_stored_unless_it_was_given_rates() -> None:
    stored, given = Rates(up=1e9, measured=True), Rates(up=2e9)
    layers = [LayerState(i, 2**18, 4, 0, 100, 1, True) for i in range(4)]

    def state(device: str) -> StepState:
        return StepState(1, layers, 2**24, 2**26, device=device, cache=ord(device[-1]))

    policy, fixed, bare = Adaptive(), Adaptive(given), Adaptive()
    for each in (policy, fixed):
        each.use_rates("cuda:0", stored)
    for each in (policy, fixed, bare):
        each.plan(state("cuda:0"))
    assert policy.model(ord("0")).rates == stored  # type: ignore[union-attr]
    assert fixed.model(ord("0")).rates == given  # type: ignore[union-attr]
    assert bare.model(ord("0")).rates == Rates()  # type: ignore[union-attr]
    policy.plan(state("cuda:1"))
    assert policy.model(ord("1")).rates == Rates(), "of another device nothing is stored"  # type: ignore[union-attr]


# Machines


def test_every_machine_has_an_estimate_and_an_unknown_one_is_an_error_that_names_them() -> None:
    for name in MACHINES:
        profile = HardwareProfile.estimate(name.upper(), LLAMA)
        assert not profile.measured
        assert profile.linear is not None
        assert profile.prefill is not None
    for wrong in ("tpu", "", 3):
        with pytest.raises(ConfigError, match="'h100'"):
            HardwareProfile.estimate(wrong)  # type: ignore[arg-type]


def test_a_device_is_found_by_its_drivers_name() -> None:
    assert machine_like("NVIDIA H200") == "h200"
    assert machine_like("NVIDIA H100 80GB HBM3") == "h100"
    assert machine_like("NVIDIA A100-SXM4-80GB") == "a100"
    assert machine_like("NVIDIA L40S") == "l40s"
    assert machine_like("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert machine_like("Some CPU") == "a100"


def test_the_roofline_is_memory_for_one_token_and_arithmetic_for_many() -> None:
    h100 = machines.machine("h100")
    linear = LLAMA.linear(h100)
    weights = LLAMA.parameters * 2 / (h100.device_memory * machines.OF_DEVICE_MEMORY)
    assert LLAMA.layers * linear.seconds(1) == pytest.approx(weights + LLAMA.layers * machines.LAUNCHES)
    assert linear.seconds(1) == linear.seconds(64), "the weights are read once for all of them"
    work = 2 * LLAMA.parameters * 8192 / (h100.flops * machines.OF_FLOPS)
    assert LLAMA.layers * linear.seconds(8192) == pytest.approx(work, rel=0.05)
    # 16 TFLOP per thousand tokens: published prefill rates of this model on one H100 are 20 to 40 thousand tokens/s.
    assert 20e3 < 8192 / LLAMA.prefill(h100).seconds(8192) < 40e3


def test_few_tokens_read_few_experts() -> None:
    h100 = machines.machine("h100")
    mixture = ModelSize(32, 4096, 32, 128, 8, 47_000_000_000, 13_000_000_000)
    dense = ModelSize(32, 4096, 32, 128, 8, 47_000_000_000, 47_000_000_000)
    assert mixture.linear_seconds(h100, 1) < 0.4 * dense.linear_seconds(h100, 1)
    assert mixture.linear_seconds(h100, 64) == dense.linear_seconds(h100, 64)


def test_a_model_of_no_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no model"):
        ModelSize(0, 4096, 32, 128, 8, 1, 1)
    with pytest.raises(ConfigError, match="active"):
        ModelSize(1, 8, 1, 8, 1, 1, 2)
