"""Fits recover what is behind noisy measurements, ignore disturbed ones, and say how far they are off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.planning import fit
from kvtier.planning.hardware.predictors import Curve, HostAttention, Linear, Prefill, PrefillSize

SIZES = [2**i * 1024 for i in range(16)]


def noisy(seed: int, share: float = 0.03) -> Callable[[float], float]:
    """Adds up to a share, as others on a machine do, and to one of eight values much more."""
    draw = random.Random(seed)
    return lambda seconds: seconds * (1 + draw.uniform(0, share)) * (3 if draw.random() < 0.125 else 1)


# Least squares


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_are_recovered_from_exact_values(seed: int) -> None:
    draw = random.Random(seed)
    rows = [[1.0, draw.uniform(0, 1e9), draw.uniform(0, 1e3)] for _ in range(12)]
    true = [draw.uniform(0.1, 1), draw.uniform(1e-9, 1e-8), draw.uniform(1e-3, 1e-2)]
    values = [sum(a * b for a, b in zip(row, true, strict=True)) for row in rows]
    assert fit.least_relative(rows, values) == pytest.approx(true, rel=1e-4)


def test_no_coefficient_is_negative_and_what_nothing_tells_is_zero() -> None:
    # Falls with the second column: without it, the mean.
    found = fit.least_relative([(1, x, 0) for x in (1.0, 2.0, 3.0, 4.0)], [1.2, 1.1, 1.0, 0.9])
    assert found[0] == pytest.approx(1.04, abs=0.05)
    assert found[1:] == [0.0, 0.0]
    with pytest.raises(ValueError, match="positive"):
        fit.least_relative([], [])
    with pytest.raises(ValueError, match="positive"):
        fit.least_relative([(1,)], [0.0])


def test_a_sequence_is_made_to_rise_and_stays_what_it_is_where_it_does() -> None:
    assert fit.rising([1, 2, 2, 5]) == [1, 2, 2, 5]
    assert fit.rising([1, 4, 2, 5]) == [1, 2, 2, 5]
    assert fit.rising([3, 2, 1]) == [1, 1, 1]


def test_held_out_points_are_predicted_by_a_fit_that_has_not_seen_them() -> None:
    seen: list[list[float]] = []

    def level(points: Any) -> Callable[[float], float]:
        seen.append([x for x, _ in points])
        return lambda x: 1.0

    points = [(1.0, 1.0), (2.0, 2.0), (3.0, 1.0), (4.0, 4.0), (5.0, 1.0)]
    assert fit.held_out_error(level, points) == pytest.approx((0.5 + 0.75) / 2)
    assert seen == [[1, 3, 5]]
    assert fit.held_out_error(level, points[:4]) == pytest.approx(0.5)
    assert seen[-1] == [1, 3, 4], "the last one is never held out"
    assert fit.held_out_error(level, points[:3]) is None


# Curves


@pytest.mark.parametrize("seed", range(8))
def test_a_curve_through_noisy_times_has_the_overhead_and_the_rate_behind_them(seed: int) -> None:
    noise, overhead, rate = noisy(seed), 20e-6, 12e9
    curve = Curve.fit([(n, noise(overhead + n / rate)) for n in SIZES])
    found = curve.line()
    assert found[0] == pytest.approx(overhead, rel=0.15)
    assert found[1] == pytest.approx(rate, rel=0.1)


def test_a_curve_follows_what_no_single_rate_describes() -> None:
    def true(n: float) -> float:
        return 5e-6 + min(n, 2**20) / 20e9 + max(n - 2**20, 0) / 5e9

    curve = Curve.fit([(n, true(n)) for n in SIZES])
    for n in (3000, 10**5, 2**20, 3 * 2**20, 2**24):
        assert curve.seconds(n) == pytest.approx(true(n), rel=1e-6), n
    assert curve.seconds(2**28) == pytest.approx(true(2**28), rel=0.02), "the rate of the largest sizes goes on"
    assert curve.seconds(0) == 0
    assert curve.seconds(1) == true(1024), "fewer bytes than were measured take as long as the fewest"


def test_more_bytes_never_take_less() -> None:
    noise = noisy(0, 0.5)
    curve = Curve.fit([(n, noise(1e-6 + n / 1e10)) for n in SIZES])
    times = [curve.seconds(2**i * 700) for i in range(20)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "knots",
    [
        (),
        ((1.0, 1.0),),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((-1.0, 1.0), (2.0, 2.0)),
        ((1.0, 0.0), (2.0, 0.0)),
        ((1.0, 1.0), (2.0, math.inf)),
        ((1.0, math.nan), (2.0, 1.0)),
    ],
)
def test_knots_that_are_no_times_are_refused(knots: Any) -> None:
    with pytest.raises(ValueError, match=r"curve|sizes"):
        Curve(knots)


def test_a_straight_curve_is_an_overhead_and_a_rate() -> None:
    curve = Curve.straight(1e-5, 2e10)
    assert curve.seconds(2e10) == pytest.approx(1 + 1e-5)
    assert curve.line()[1] == pytest.approx(2e10, rel=0.01)


# Host attention


def test_host_attention_is_priced_by_threads_queries_and_a_busy_link() -> None:
    one, four = Curve.straight(1e-5, 1e10), Curve.straight(2e-5, 3e10)
    host = HostAttention(((1, one), (4, four)), ((1.0, 1.0), (16.0, 4.0)), lost=0.5, round_trip=1e-3)
    alone = host.seconds(1e9) - 1e-3
    assert alone == pytest.approx(four.seconds(1e9))
    assert host.seconds(1e9, threads=3) - 1e-3 == pytest.approx(one.seconds(1e9)), "more was not measured of three"
    assert host.seconds(1e9, threads=64) - 1e-3 == pytest.approx(alone)
    assert host.seconds(1e9, queries=16) - 1e-3 == pytest.approx(4 * alone)
    assert host.seconds(1e9, queries=64) - 1e-3 == pytest.approx(4 * alone)
    assert host.seconds(1e9, busy=1.0) - 1e-3 == pytest.approx(2 * alone)
    assert host.seconds(0) == 0, "no query goes down for nothing"


# A model


@pytest.mark.parametrize("seed", range(8))
def test_a_prefill_is_recovered_from_noisy_times_of_some_sizes(seed: int) -> None:
    noise = noisy(seed)
    true = Prefill(fixed=5e-3, per_token=2e-4, per_pair=3e-8, per_own=6e-8, per_past=1e-6)
    sizes = [PrefillSize(n, p, b) for n in (32, 128, 512, 2048) for p in (0, 512, 4096) for b in (1, 2)]
    found = Prefill.fit([(x, noise(true.seconds(x.new, x.past, x.batch))) for x in sizes])
    for new, past, batch in ((64, 256, 1), (1024, 2048, 1), (256, 3000, 4), (700, 0, 2)):
        assert found.seconds(new, past, batch) == pytest.approx(true.seconds(new, past, batch), rel=0.08)


def test_a_prefill_counts_every_pair_of_a_new_token_and_one_that_it_sees() -> None:
    pairs = Prefill(0.0, 0.0, 1.0, 1.0)
    for new, past, batch in ((1, 0, 1), (3, 0, 1), (3, 4, 2)):
        assert pairs.seconds(new, past, batch) == batch * sum(past + i for i in range(1, new + 1))
    # So a prompt in parts costs what it costs as a whole, but for what is fixed.
    assert pairs.seconds(5) + pairs.seconds(7, past=5) == pairs.seconds(12)
    # Those of two new tokens may cost more than those of a new one and a cached one.
    assert Prefill(0.0, 0.0, 1.0, 3.0).seconds(4, past=5, batch=2) == 2 * (4 * 5 + 3 * (1 + 2 + 3 + 4))
    assert pairs.seconds(0, 100) == 0
    with pytest.raises(ValueError, match="coefficients"):
        Prefill(-1.0, 0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="coefficients"):
        Prefill(0.0, 0.0, 0.0, 0.0)


def test_a_linear_part_goes_on_in_proportion() -> None:
    linear = Linear.fit([(1, 1.0), (8, 1.5), (4, 1.2)])
    assert linear.knots == ((1, 1.0), (4, 1.2), (8, 1.5))
    assert linear.seconds(2) == pytest.approx(1 + 0.2 / 3)
    assert linear.seconds(16) == pytest.approx(3.0)
    assert linear.seconds(0.5) == 1.0
