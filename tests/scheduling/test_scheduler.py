"""Plans of a step."""

from __future__ import annotations

from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.scheduler import Scheduler


def test_a_prompt_that_is_half_there_goes_on_before_one_that_does_not_fit() -> None:
    half = Job(1, 0.0, 100, 200, cached=60, blocks=4, running=True)
    large = Job(2, 1.0, 300, 400, priority=1)
    plan = Scheduler().plan(Load(2.0, [half], [large], 8, 16, 64, 8))
    assert plan.tokens == {half: 40}


def test_nobody_passes_one_that_does_not_fit() -> None:
    runs = Job(0, 0.0, 17, 40, cached=16, blocks=1, running=True)
    large, small = Job(1, 0.0, 300, 400), Job(2, 0.0, 10, 20)
    plan = Scheduler().plan(Load(2.0, [runs], [large, small], 8, 16, 64, 8))
    assert plan.tokens == {runs: 1}
