"""A simulated engine accounts for every block and token, and one request takes what the arithmetic says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.eviction.replay.traces import azure as replayed_azure
from kvtier.planning.hardware.machines import COPY, LAUNCHES, OF_DEVICE_MEMORY, OF_FLOPS, OF_LINK
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.job import Load, Step
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.simulation.loads import azure, conversations, lognormal, mooncake, poisson
from kvtier.scheduling.simulation.outcome import Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import Simulation, simulate

SCHEDULERS: list[Callable[[], Scheduler]] = [FirstComeFirstServed, Fair]


def test_one_request_takes_what_the_arithmetic_says(profile: Profile) -> None:
    found = simulate([Request(2.0, 10, 3)], profile, FirstComeFirstServed(), max_tokens=6)
    served = found.requests[0]
    flops, memory = 1e6 * OF_FLOPS, 1e6 * OF_DEVICE_MEMORY

    def step(tokens: int, past: int) -> float:
        # 500 parameters of 2 bytes are read, or 2 operations done for each; 8 bytes of KV per token;
        # 4 operations for each of 4 numbers of the heads and pair of tokens.
        linear = max(1000 / memory, 1000 * tokens / flops) + LAUNCHES
        attention = max(past * 8 / memory, 16 * tokens * (past + (tokens + 1) / 2) / flops)
        return 0.01 + linear + attention

    first = step(6, 0) + step(4, 6)
    assert served.scheduled == 2.0
    assert served.first == pytest.approx(2.0 + first)
    assert served.finished == pytest.approx(2.0 + first + step(1, 10) + step(1, 11))
    assert (found.steps, found.computed) == (4, 12)
    figures = found.figures()
    assert figures["ttft_mean"] == pytest.approx(first)
    assert figures["tpot_mean"] == pytest.approx((step(1, 10) + step(1, 11)) / 2)
    assert figures["turnaround"] == 1.0


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_swap_takes_two_copies(profile: Profile, overlaps: bool) -> None:
    class Once(FirstComeFirstServed):
        """Preempts the first job when it has nine tokens."""

        def plan(self, load: Load) -> Step:
            for job in load.running:
                if job.cached == 9:
                    return Step(preempt=[job], ways={job: "swap"})
            return super().plan(load)

    machine = replace(profile.machine, overlaps=overlaps)
    profile = replace(profile, machine=machine)
    request = Request(0.0, 8, 4)
    alone = simulate([request], profile, FirstComeFirstServed(), check=True)
    found = simulate([request], profile, Once(), check=True)
    copy = COPY + 9 * 8 / (1e4 * OF_LINK)
    assert found.requests[0].swapped == 1
    assert found.computed == alone.computed
    step = alone.seconds - alone.requests[0].first  # of three tokens: the copy up hides behind the first
    assert copy < step / 3
    # The way down is a step of its own here, whose fixed part is the overhead.
    assert found.seconds == pytest.approx(
        alone.seconds + max(0.01, copy) if overlaps else alone.seconds + 0.01 + 2 * copy
    )


@pytest.mark.parametrize("seed", range(40))
def test_blocks_and_tokens_are_accounted_for(profile: Profile, seed: int) -> None:
    draw = random.Random(seed)
    requests = poisson(
        25, draw.choice([1.0, 20.0, float("inf")]), lognormal(20, 0.8, 80), lognormal(20, 0.8, 60), seed=seed
    )
    requests = [replace(x, tenant=draw.choice("ab"), priority=draw.choice([0, 0, 1])) for x in requests]
    if seed % 2:
        requests = conversations(
            8,
            5.0,
            turns=4,
            prompt=lognormal(15, 0.8),
            output=lognormal(15, 0.8),
            think=0.3,
            most=150,
            block_size=4,
            seed=seed,
        )
    profile = replace(
        profile,
        host_blocks=draw.choice([0, 5, 200]),
        write_through=draw.random() < 0.5,
        machine=replace(profile.machine, overlaps=draw.random() < 0.5),
    )
    scheduler = draw.choice(SCHEDULERS)()
    ways = draw.choice([None, "swap", "recompute"])
    options = {"ways": ways, "stateful": draw.random() < 0.7, "max_tokens": draw.choice([8, 64]), "max_running": 16}
    simulation = Simulation(requests, profile, scheduler, check=True, **options)
    found = simulation.run()
    again = simulate(requests, profile, draw.choice([type(scheduler)])(), **options)
    assert found == again  # the same every time
    assert simulation.free + sum(x.device for x in simulation._kept.values()) == profile.device_blocks
    for served in found.requests:
        assert served.arrived <= served.scheduled < served.first <= served.finished
    least = sum(x.prompt + x.output - 1 - x.reused for x in found.requests)
    assert found.computed >= least
    if not any(x.swapped or x.recomputed for x in found.requests):
        assert found.computed == least


def test_what_is_kept_is_not_computed_again(profile: Profile) -> None:
    keys = tuple(range(10))
    requests = [Request(0.0, 24, 4, keys), Request(1.0, 36, 2, keys, after=0)]
    lost = simulate(requests, profile, FirstComeFirstServed(), check=True)
    kept = simulate(requests, profile, FirstComeFirstServed(), stateful=True, check=True)
    # 24 + 3 tokens were computed: six full blocks.
    assert [x.reused for x in kept.requests] == [0, 24]
    assert lost.computed - kept.computed == 24
    assert kept.requests[1].arrived == kept.requests[0].finished + 1.0


def test_a_request_that_can_never_fit_is_refused(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="Request 0, of 161 tokens, takes more blocks than the 40"):
        Simulation([Request(0.0, 100, 61)], profile, FirstComeFirstServed())
    simulate([Request(0.0, 100, 60)], profile, FirstComeFirstServed(), check=True)


#: Of a Mooncake trace.
_ROW = '{{"timestamp": {}, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}}\n'


def test_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,10,2\n"
    )
    assert azure(file, scale=2.0) == [Request(0.0, 374, 44), Request(2.0, 10, 2)]
    other = tmp_path / "mooncake.jsonl"
    other.write_text(_ROW.format(9000) + _ROW.format(6000))
    keys = ((7, 0), (7, 1))
    assert mooncake(other, block_size=256) == [Request(3.0, 700, 5, keys), Request(0.0, 700, 5, keys)]
    for path, read in ((other, azure), (file, mooncake), (tmp_path / "none", azure)):
        with pytest.raises(ConfigError, match="not a"):
            read(path)


def test_figures_of_a_trace_do_not_depend_on_when_it_begins(tmp_path: Path, profile: Profile) -> None:
    file, found = tmp_path / "mooncake.jsonl", []
    for began in (0, 3_600_000):
        file.write_text("".join(_ROW.replace("700", "30").format(began + 500 * i) for i in range(4)))
        outcome = simulate(mooncake(file), profile, FirstComeFirstServed())
        found.append(outcome.figures())
    assert found[0] == found[1]


def test_arrivals_do_not_depend_on_the_zone_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "azure.csv"
    # A whole second has no fraction in the trace of 2024, so its line is shorter.
    times = ["2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 00:00:01.500000+00:00"]
    before_and_after_summer = ["2023-10-29 01:59:59.5000000", "2023-10-29 03:00:00.5000000"]
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        for some, arrived in ((times, [0.0, 0.5, 1.0]), (before_and_after_summer, [0.0, 3601.0])):
            file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{x},9,2\n" for x in some))
            assert [x.arrived for x in azure(file)] == arrived
            assert [x.time for x in replayed_azure(file, conversations=1)] == arrived
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (mooncake, "", "it has no request"),
        (mooncake, _ROW.format("NaN"), "the timestamp nan is no time"),
        (mooncake, _ROW.format("1e999"), "the timestamp inf is no time"),
        (mooncake, _ROW.format(0).replace("[7, 8]", "[[7], 8]"), "unhashable type: 'list'"),
        (mooncake, _ROW.format(0).replace("700", "700.5"), "'float' object cannot be interpreted as an integer"),
        (mooncake, _ROW.format(0).replace(": 5", ": 5.5"), "'float' object cannot be interpreted as an integer"),
        (azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "x" * 200_000, "field larger than field limit"),
    ],
)
def test_a_file_that_no_engine_can_serve_is_no_trace(
    read: Callable[[Path], list[Request]], content: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"not an? .* trace: .*{words}"):
        read(file)
