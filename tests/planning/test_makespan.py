"""The choice between one forward and two that take turns is never worse by its own prediction; what two take is bounded
by what device and host do, and is what an event-by-event model of both says."""

from __future__ import annotations

import math
import random

import pytest

from kvtier.planning.sub_batches import MOST_LEFT, Learned, Rates, Row, Stage, apart, choose, stage, together


def drawn(rng: random.Random) -> tuple[list[Row], Rates]:
    rows = [
        Row(
            rng.choice((1, 1, 1, 64)),
            rng.choice((0.0, rng.random() * 1e7)),
            rng.choice((0.0, rng.random() * 1e7)),
            rng.randrange(MOST_LEFT + 1),
        )
        for _ in range(rng.randint(1, 12))
    ]
    fixed, slope = rng.random() * 5e-3, rng.random() * 1e-5
    return rows, Rates(
        rng.randint(1, 40),
        lambda tokens: fixed + slope * tokens,
        device_rate=rng.choice((1e9, 1e12)),
        host_rate=rng.choice((1e8, 1e9, 1e11)),
        host_overhead=rng.choice((0.0, 1e-4)),
    )


@pytest.mark.parametrize("seed", range(300))
def test_no_other_way_computes_more_rows_in_a_second_by_the_same_prediction(seed: int) -> None:
    rows, times = drawn(random.Random(seed))
    choice = choose(rows, times, may_leave=seed % 2 == 0)
    best = max(count / seconds for count, seconds in choice.others.values())
    assert len(choice.rows) / choice.seconds >= best / 1.031
    assert choice.second < set(choice.rows)
    assert all(rows[i].host_bytes for i in choice.second)
    left = set(range(len(rows))) - set(choice.rows)
    assert all(rows[i].host_bytes and rows[i].left < MOST_LEFT for i in left)
    assert not left or seed % 2 == 0
    assert choice.name in choice.others
    assert choice.others[choice.name] == (len(choice.rows), choice.seconds)


def by_events(first: Stage, second: Stage, layers: int) -> float:
    """The same by what waits for what, without a thread: a list of tasks on two machines in the order in which they are
    given, each behind those that it needs."""
    ends: dict[tuple[str, int, int], float] = {}
    device = host = given = 0.0
    for layer in range(layers):
        for i, each in enumerate((first, second)):
            begins = max(device, given, ends.get(("host", i, layer - 1), 0.0))
            ends["linear", i, layer] = begins + each.linear
            device = begins + each.linear + each.device
            # Before the next one is given anything, the thread attends for it.
            other, its = 1 - i, layer - (i == 0)
            if (first, second)[other].host and its >= 0:
                begins = max(host, given, ends["linear", other, its])
                host = ends["host", other, its] = begins + (first, second)[other].host
                given = host
    if second.host:
        host = max(host, ends["linear", 1, layers - 1]) + second.host
    return max(device, host)


@pytest.mark.parametrize("seed", range(300))
def test_two_forwards_take_what_device_and_host_do_in_that_order(seed: int) -> None:
    rng = random.Random(seed)

    def one() -> Stage:
        return Stage(rng.random(), rng.choice((0.0, rng.random())), rng.choice((0.0, rng.random(), 3 * rng.random())))

    first, second, layers = one(), one(), rng.randint(1, 9)
    took = apart(first, second, layers)
    assert math.isclose(took, by_events(first, second, layers))
    work = (first, second)
    assert took >= layers * sum(x.linear + x.device for x in work) - 1e-9
    assert took >= layers * sum(x.host for x in work) - 1e-9
    assert took >= layers * max(x.linear + x.host for x in work) - 1e-9
    assert took <= layers * sum(x.linear + x.device + x.host for x in work) + 1e-9


def test_a_prompt_hides_the_attention_of_rows_on_the_host() -> None:
    """Neo, figure 5: prompts and rows on the device first; of those on the host most are second, and hide behind it."""
    times = Rates(32, lambda tokens: 1e-3 if tokens <= 64 else 5e-3, host_rate=1e9)
    rows = [Row(512), *(Row(1, 1e6) for _ in range(8)), *(Row(1, 0.0, 1e6) for _ in range(4))]
    choice = choose(rows, times)
    assert choice.second >= {10, 11, 12}
    assert choice.second <= {9, 10, 11, 12}
    assert together(stage(rows, times), 32) == pytest.approx(32 * 9e-3)
    assert choice.seconds == pytest.approx(32 * 6e-3, rel=0.04)


def test_rows_that_are_alike_are_halved_where_the_host_is_slow() -> None:
    """Neo, figure 4: without a prompt two equal halves are best, if weights are read twice for it."""
    rows, layers = [Row(1, 0.0, 1e6) for _ in range(8)], 32
    choice = choose(rows, Rates(layers, lambda tokens: 4e-3, host_rate=1e9))
    assert len(choice.second) == 4
    assert choice.seconds == pytest.approx(layers * 8e-3, rel=0.05)
    assert choice.others["together"][1] == pytest.approx(layers * 12e-3)
    quick = choose(rows, Rates(layers, lambda tokens: 4e-3, host_rate=1e11))
    assert quick.name == "together"


def test_rows_on_the_host_wait_for_a_few_steps_only() -> None:
    """However little they add to a step's rows, and however much to its time."""
    rows = [*(Row(1, 1e6) for _ in range(8)), Row(1, 0.0, 1e8)]
    times = Rates(32, lambda tokens: 1e-3, host_rate=1e9)
    assert choose(rows, times, may_leave=True).name == "device only"
    assert choose(rows, times).name != "device only"
    waited = [*rows[:-1], rows[-1]._replace(left=MOST_LEFT)]
    assert len(choose(waited, times, may_leave=True).rows) == 9


def test_what_steps_show_is_learned() -> None:
    times = Learned(10)
    rows = [Row(1, 0.0, 1e6) for _ in range(8)]
    assert not times.known
    for _ in range(3):
        times.observe(rows, None, 10 * (4e-3 + 8e-3), (80_000_000, 0.08))
    assert times.known
    assert times.linear(8) == pytest.approx(4e-3)
    assert times.linear(1) == times.linear(8), "fewer tokens are not known to take less"
    assert times.linear(64) == pytest.approx(32e-3), "more are not known to be free"
    assert times.host(8e6) == pytest.approx(8e-3)
    choice = choose(rows, times)
    assert choice.name == "sub-batches"
    for _ in range(9):  # two forwards turn out to take twice as long
        times.observe(rows, choice, 2 * choice.seconds, (80_000_000, 0.08))
    assert choose(rows, times, factor=times.factor).name == "together"
