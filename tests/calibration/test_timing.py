"""Calls are timed in turn, until their times agree or the time is over, and what disturbed them is left out."""

from __future__ import annotations

import random

import pytest

from kvtier.calibration import timing
from kvtier.calibration.timing import LEAST_ROUNDS, MOST_ROUNDS, Samples, in_turn


class Machine:
    """A clock that calls move on, and switches that preempt them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.switches, self.made = 0.0, 0, []  # type: float, int, list[str]
        monkeypatch.setattr(timing, "_switches", lambda: self.switches)

    def call(self, name: str, seconds: float, noise: float = 0.0, cut: float = 0.0) -> object:
        draw = random.Random(name)

        def run() -> None:
            self.made.append(name)
            self.now += seconds * (1 + draw.uniform(0, noise))
            if draw.random() < cut:
                self.now += 10 * seconds
                self.switches += 1

        return run

    def clock(self) -> float:
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_times_that_agree_end_it_early(machine: Machine) -> None:
    found = in_turn([machine.call("a", 1.0), machine.call("b", 2.0)], 1e6, clock=machine.clock)
    assert found == pytest.approx([1.0, 2.0])
    assert len(machine.made) == 2 * (LEAST_ROUNDS + 1), "and a round that does not count"


def test_each_round_has_every_call_once_in_some_order(machine: Machine) -> None:
    in_turn([machine.call(x, 1.0, noise=0.5) for x in "abc"], 1e6, clock=machine.clock)
    rounds = [machine.made[i : i + 3] for i in range(0, len(machine.made), 3)]
    assert all(sorted(x) == ["a", "b", "c"] for x in rounds)
    assert len({tuple(x) for x in rounds}) == 6
    assert len(rounds) == MOST_ROUNDS + 1, "times that never agree end it too"


def test_it_ends_with_the_round_in_which_the_time_is_over(machine: Machine) -> None:
    in_turn([machine.call("a", 1.0, noise=1.0)], 10.0, clock=machine.clock)
    assert 10 <= machine.now < 12
    machine.now, machine.made = 0.0, []
    in_turn([machine.call("a", 100.0)], 0.001, clock=machine.clock)
    assert len(machine.made) == 2, "one round is made in any case"


def test_a_preempted_sample_does_not_count(machine: Machine) -> None:
    (found,) = in_turn([machine.call("a", 1.0, cut=0.9)], 1000.0, clock=machine.clock)
    assert found == pytest.approx(1.0)


def test_where_every_sample_was_preempted_they_serve() -> None:
    samples = Samples()
    for x in (3.0, 5.0, 4.0, 6.0, 7.0):
        samples.add(x, preempted=True)
    assert samples.seconds == 4.0
    assert not samples.settled


def test_one_lucky_sample_and_a_few_slow_ones_change_nothing() -> None:
    samples = Samples()
    for x in [0.5, *[1.0] * 20, *[9.0] * 10]:
        samples.add(x, preempted=False)
    assert samples.seconds == 1.0


def test_a_short_call_is_made_once_more_before_each_sample(machine: Machine) -> None:
    in_turn([machine.call("short", timing.SHORT / 2), machine.call("long", 1.0)], 1e6, clock=machine.clock)
    assert machine.made.count("short") == 2 * LEAST_ROUNDS + 1
    assert machine.made.count("long") == LEAST_ROUNDS + 1


def test_what_follows_a_call_is_not_timed(machine: Machine) -> None:
    after = machine.call("after", 50.0)
    (found,) = in_turn([machine.call("a", 1.0)], 1e6, after=[after], clock=machine.clock)
    assert found == pytest.approx(1.0)
    assert machine.made == ["a", "after"] * (LEAST_ROUNDS + 1)
