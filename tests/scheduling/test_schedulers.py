"""What holds for every scheduler and every load, on a simulated memory: see `World._check` for each step's rules."""

from __future__ import annotations

import os

import pytest
from simulated import World, random_world

from kvtier.errors import ConfigError
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.scheduler import Scheduler

WORKLOADS = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))
SCHEDULERS = (FirstComeFirstServed, Fair)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("part", range(4))
def test_every_job_ends_and_no_step_breaks_a_rule(scheduler: type[Scheduler], part: int) -> None:
    for seed in range(part * 10**6, part * 10**6 + 150 * WORKLOADS):
        world = random_world(seed, scheduler())
        assert not world.live


@pytest.mark.parametrize("part", range(2))
def test_first_come_is_first_served(part: int) -> None:
    for seed in range(part * 10**6, part * 10**6 + 100 * WORKLOADS):
        world = random_world(seed, FirstComeFirstServed(), priorities=False)
        numbers = [job.number for job in world.order]
        assert numbers == sorted(numbers), seed


def test_a_large_job_waits_no_longer_than_the_bound_and_those_before_it() -> None:
    for chunked in (True, False):
        for large in (6, 30, 60):
            world = World(Fair(bound=20.0), total=16, size=4, max_tokens=8, chunked=chunked)
            for _ in range(4):
                world.add(3, 3)
            job = world.add(large, 4)
            others = 0
            while job not in world.began:
                world.add(3, 3)  # small ones come for ever
                world.add(2, 2)
                world.step()
                others += 1
                assert others < 40, (chunked, large)
            world.run()


def test_a_short_job_goes_before_a_long_one_that_came_just_before() -> None:
    world = World(Fair(), total=16, size=4, max_tokens=4, max_running=1)
    running = world.add(3, 6)
    world.step()
    long, short = world.add(40, 2), world.add(3, 2)
    world.run()
    assert world.order == [running, short, long]


def test_a_short_job_goes_before_the_rest_of_a_long_one_that_has_begun() -> None:
    world = World(Fair(), total=40, size=4, max_tokens=8)
    decoding = world.add(3, 30)
    world.step()
    long = world.add(100, 2)
    world.step()
    short = world.add(5, 2)
    world.step()  # who has waited for nothing yet passes nobody
    step = world.step()
    assert step.tokens == {decoding: 1, short: 5, long: 2}
    assert not step.preempt
    world.run()
    assert world.ended[short] < world.ended[long]
    assert not world.preempted


def test_what_is_left_of_a_long_prompt_is_soon_short_enough() -> None:
    world = World(Fair(), total=40, size=4, max_tokens=8)
    long = world.add(100, 2)
    for _ in range(11):
        world.step()
    short = world.add(6, 2)
    world.step()
    assert long.left == 4
    assert world.step().tokens == {long: 4, short: 4}


def test_a_long_prompt_that_has_begun_is_passed_for_no_longer_than_the_bound() -> None:
    world = World(Fair(bound=20.0), total=100, size=4, max_tokens=8)
    long = world.add(100, 2)
    world.step()
    while long not in world.ended:
        world.add(8, 1)  # short ones come for ever, of which each takes a whole step
        world.step()
        assert world.steps < 40
    world.run()


def test_a_short_job_is_not_let_in_on_the_room_of_a_long_one_that_has_begun() -> None:
    world = World(Fair(), total=26, size=4, max_tokens=8)
    long = world.add(100, 2)
    world.step()
    short = world.add(5, 2)
    for _ in range(3):
        assert world.step().tokens == {long: 8}
    world.run()
    assert {long, short} <= world.ended.keys()


def test_a_job_whose_prompt_is_cached_goes_before_a_shorter_one() -> None:
    world = World(Fair(), total=40, size=4, max_tokens=4, max_running=1)
    first = world.add(3, 6)
    world.step()
    plain, cached = world.add(20, 2), world.add(60, 2)
    world.step()
    cached.reusable = 56
    keys = [Fair().key(job, world.load()) for job in (plain, cached)]
    assert keys[1] < keys[0]
    assert first.running


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_prompt_longer_than_a_step_is_not_passed_for_ever_where_prompts_are_whole(
    scheduler: type[Scheduler],
) -> None:
    world = World(scheduler(), total=400, size=4, max_tokens=8, chunked=False)
    world.add(3, 5)
    world.step()
    long = world.add(30, 2)
    for _ in range(120):
        world.add(3, 5)  # so that there is always a next token to compute
        world.step()
    assert long in world.ended


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_prompt_that_is_half_there_goes_on_while_one_of_higher_priority_waits_for_room(
    scheduler: type[Scheduler],
) -> None:
    world = World(scheduler(), total=10, size=4, max_tokens=4)
    low = world.add(36, 2)
    world.step()
    world.step()
    high = world.add(36, 2, priority=1)
    world.run()
    assert {low, high} <= world.ended.keys()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_higher_priorities_go_first(scheduler: type[Scheduler]) -> None:
    world = World(scheduler(), total=100, size=4, max_tokens=8, max_running=1)
    first = world.add(4, 8)
    world.step()
    low, high = world.add(4, 2), world.add(30, 2, priority=3)
    world.run()
    assert world.order == [first, high, low]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_that_outgrows_what_is_free_alone_is_left_to_the_memory(scheduler: type[Scheduler]) -> None:
    """The count of blocks is an estimate, others may use the memory too: the memory answers, and nobody waits for what
    never comes."""
    world = World(scheduler(), total=4, size=4, max_tokens=64)
    job = world.add(9, 4)
    load = world.load()
    load.free_blocks = 1
    assert scheduler().plan(load).tokens == {job: 9}
    world.step()
    job.cached = job.tokens - 1
    load = world.load()
    job.cached, job.tokens, job.blocks = 12, 13, 3
    load.free_blocks = 0
    step = scheduler().plan(load)
    assert (step.tokens, step.preempt) == ({job: 1}, [])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_of_prompts_that_keep_each_other_from_going_on_the_last_gives_way(scheduler: type[Scheduler]) -> None:
    world = World(scheduler(), total=8, size=4, max_tokens=8)
    first, last = world.add(24, 2), world.add(24, 2)
    for job in (first, last):
        job.running, job.cached = True, 16
    step = scheduler().plan(world.load())
    assert (step.tokens, step.preempt) == ({}, [last])
    world.run()


def test_names() -> None:
    assert isinstance(scheduler_of("fair"), Fair)
    assert isinstance(scheduler_of("fcfs"), FirstComeFirstServed)
    mine = Fair(1.0)
    assert scheduler_of(mine) is mine
    for wrong in ("lifo", None, 3, Fair):
        with pytest.raises(ConfigError, match="fair"):
            scheduler_of(wrong)  # type: ignore[arg-type]
