"""What preempted jobs cost: the cheaper way, never worse than either way always."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvtier.scheduling.job import Job, Load, Ways
from kvtier.scheduling.prices import RECOMPUTE, SWAP, Always, Prices
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.simulation.trials import against_the_better

PRICES = Prices(fixed=0.01, per_token=1e-4, per_pair=0.0, up=1e-3, down=1e-3, overlaps=False)


def test_prices_by_hand() -> None:
    assert PRICES.swap(100, 16) == pytest.approx(0.2)
    assert PRICES.recompute(100) == pytest.approx(0.02)
    # Ten rows are computed for 1 ms of the 10 ms in which the weights are read: 90 tokens are free.
    assert PRICES.recompute(100, rows=10) == pytest.approx(0.001)
    hides = Prices(0.01, 1e-4, 0.0, 1e-3, 1e-3, overlaps=True, written_through=True)
    assert hides.swap(100, 16, step=0.03) == pytest.approx(0.07)  # four tokens down, hidden; 100 up
    assert hides.swap(0, 16) == hides.recompute(0) == 0.0


def _load(*jobs: Job, host: int, ways: Ways) -> Load:
    return Load(0.0, list(jobs), [], 0, 16, 100, 8, free_host_blocks=host, ways=ways)


def _job(number: int, cached: int) -> Job:
    return Job(number, 0.0, cached + 1, 1000, cached=cached, blocks=-(-cached // 16), running=True)


def test_what_does_not_fit_on_the_host_is_recomputed() -> None:
    cheap = Prices(0.01, 1e-2, 0.0, 1e-6, 1e-6, overlaps=False)
    for ways in (cheap, Always(SWAP)):
        plan = Scheduler().plan(_load(_job(0, 16), _job(1, 32), host=2, ways=ways))
        assert plan.ways == {plan.preempt[0]: SWAP}
        plan = Scheduler().plan(_load(_job(0, 16), _job(1, 32), host=1, ways=ways))
        assert plan.ways == {plan.preempt[0]: SWAP if plan.preempt[0].blocks == 1 else RECOMPUTE}


def test_the_cheaper_one_is_preempted_where_that_is_clear() -> None:
    # Pairs make long ones dear: 160 tokens cost far more per block than 16.
    pairs = Prices(0.0, 1e-9, 1e-3, 1.0, 1.0, overlaps=False)
    jobs = [_job(0, 16), _job(1, 16), _job(2, 160)]
    plan = Scheduler().plan(_load(*jobs, host=0, ways=pairs))
    assert plan.preempt[0] is jobs[1]
    assert Scheduler().plan(_load(*jobs, host=0, ways=Always(RECOMPUTE))).preempt[0] is jobs[2]


def test_what_is_saved_comes_back_from_the_disk_where_that_is_quicker() -> None:
    quick = Prices(0.01, 1e-2, 0.0, 1e-5, 1e-5, overlaps=False, load=1e-4, load_fixed=0.02)
    assert quick.from_disk(100) == pytest.approx(0.03 + 0.001)
    assert quick.from_disk(100, step=0.02) == pytest.approx(0.01 + 0.001)
    assert quick.from_disk(0) == 0.0
    job, other = _job(1, 160), _job(0, 16)
    load = _load(other, job, host=0, ways=quick)
    computed = quick.way(job, load, 0)[1]
    job.saved = 96
    way, price = quick.way(job, load, 0)
    assert (way, price) == (RECOMPUTE, pytest.approx(quick.from_disk(96, 0.01) + quick.recompute(64, 1, 96)))
    assert price < computed
    slow = Prices(0.01, 1e-2, 0.0, 1e-5, 1e-5, overlaps=False, load=1.0)
    assert slow.way(job, load, 0)[1] == computed
    assert Prices(0.01, 1e-2, 0.0, 1e-5, 1e-5, overlaps=False).way(job, load, 0)[1] == computed, "no load was seen yet"


def test_one_that_is_saved_is_preempted_rather_than_one_that_is_computed_again() -> None:
    quick = Prices(0.01, 1e-2, 0.0, 1e-6, 1e-6, overlaps=False, load=1e-6)
    jobs = [_job(0, 16), _job(1, 160), _job(2, 160)]
    assert Scheduler().plan(_load(*jobs, host=0, ways=quick)).preempt[0] is jobs[2]
    jobs[1].saved = 160
    assert Scheduler().plan(_load(*jobs, host=0, ways=quick)).preempt[0] is jobs[1]


def test_nobody_is_preempted_out_of_turn_for_less_than_two_steps() -> None:
    jobs = [_job(0, 16), _job(1, 16), _job(2, 16)]
    for price, chosen in ((0.019, jobs[2]), (0.021, jobs[1])):
        ways = _Given({jobs[0]: 0.0, jobs[1]: 0.0, jobs[2]: price}, 0.01)
        assert Scheduler().plan(_load(*jobs, host=4, ways=ways)).preempt[0] is chosen


@dataclass
class _Given:
    """Prices by job, and seconds of a step."""

    prices: dict[Job, float]
    seconds: float

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        return SWAP, self.prices[job]

    def step(self, load: Load) -> float:
        return self.seconds


def test_a_lower_priority_goes_first_whatever_it_costs() -> None:
    pairs = Prices(0.0, 1e-9, 1e-3, 1.0, 1.0, overlaps=False)
    jobs = [_job(0, 16), _job(1, 16), _job(2, 160)]
    for job in jobs[:2]:
        job.priority = 1
    assert Scheduler().plan(_load(*jobs, host=0, ways=pairs)).preempt[0] is jobs[2]


def test_without_prices_nothing_is_said_about_ways() -> None:
    plan = Scheduler().plan(Load(0.0, [_job(0, 16), _job(1, 32)], [], 0, 16, 100, 8))
    assert plan.preempt
    assert plan.ways == {}


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_the_better_way(seed: int) -> None:
    """All 300 are in `benchmarks serving_simulated`."""
    price, swap, recompute = against_the_better(seed)
    assert price <= 1.02 * min(swap, recompute)
