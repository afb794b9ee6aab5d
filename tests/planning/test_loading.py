"""Loading or computing: what is chosen is never much worse than the better of the two."""

from __future__ import annotations

import random

import pytest

from kvtier.planning.loading import PROBE, LoadOrCompute
from kvtier.planning.predictors import Prefill

BYTES = 100_000  # of a token


def machine(draw: random.Random) -> tuple[Prefill, float, float]:
    """What a prefill takes, and the overhead and the seconds per byte of a disk."""
    per_token = 10 ** draw.uniform(-5, -2.5)
    prefill = Prefill(draw.uniform(1e-3, 3e-2), per_token, per_token / 10 ** draw.uniform(3.5, 5))
    return prefill, draw.uniform(0, 5e-3), 1 / 10 ** draw.uniform(7, 10)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_is_within_a_tenth_of_the_better_once_it_was_tried(seed: int) -> None:
    draw = random.Random(seed)
    prefill, overhead, per_byte = machine(draw)
    choice, chosen, loading, computing = LoadOrCompute(), 0.0, 0.0, 0.0
    for n in range(120):
        tokens, past, more = draw.randrange(500, 20_000), draw.choice((0, 0, 4000)), draw.randrange(16, 600)
        noise = draw.uniform(0.98, 1.02)
        load = (overhead + per_byte * tokens * BYTES) * noise
        compute = (prefill.seconds(tokens + more, past) - prefill.seconds(more, past + tokens)) * noise
        probes = choice._computed >= PROBE
        if choice.loads(tokens * BYTES, tokens, past, more):
            choice.loaded(tokens * BYTES, load)
            choice.computed(more, past + tokens, 1, prefill.seconds(more, past + tokens) * noise)
            taken = load
        else:
            choice.computed(tokens + more, past, 1, prefill.seconds(tokens + more, past) * noise)
            taken = compute
        if n >= 40 and not probes:
            chosen += taken
            loading += load
            computing += compute
    assert loading
    assert chosen <= 1.1 * min(loading, computing)


def test_nothing_is_known_at_first_and_it_loads() -> None:
    choice = LoadOrCompute()
    assert choice.loads(10**12, 100, 0, 10)
    choice.loaded(10**9, 100.0)
    assert choice.loads(10**12, 100, 0, 10), "nobody knows what computing takes"
    choice.computed(1, 100, 1, 0.1)
    assert choice.loads(10**12, 100, 0, 10), "one token tells nothing of many"


def test_a_disk_that_becomes_faster_is_noticed() -> None:
    choice = LoadOrCompute()
    for _ in range(60):
        choice.loaded(10**9, 100.0)
        choice.computed(1000, 0, 1, 1.0)
    assert [choice.loads(10**9, 1000, 0, 10) for _ in range(PROBE + 2)] == [False] * PROBE + [True, False]
    loads = 0
    for _ in range(PROBE * 30):
        if choice.loads(10**9, 1000, 0, 10):
            loads += 1
            choice.loaded(10**9, 0.1)
    assert loads > PROBE * 5


def test_a_longer_past_makes_computing_dearer() -> None:
    choice, prefill = LoadOrCompute(), Prefill(0.01, 1e-4, 1e-7)
    for new in (100, 400, 1600, 6400):
        for past in (0, 2000, 30000):
            choice.computed(new, past, 1, prefill.seconds(new, past))
    near, far = (choice.seconds_to_compute(1000, past, 64) for past in (0, 50_000))
    assert near is not None
    assert far is not None
    assert far > 10 * near
