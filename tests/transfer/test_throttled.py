"""Copies that take the time of a link: never less than it, in order, and what they move is there when they have ended.

Only what holds however slow this machine is at the moment: lower bounds, order, and waits without end until the test
lets the link go faster.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, TransferError
from kvtier.stats import Counters
from kvtier.testing import throttled
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.engine import Direction, State, Transfer
from kvtier.transfer.throttled import DeviceClock, Lane, Link, Moment, ThrottledTransfers, Ticket

CPU = torch.device("cpu")
UP, DOWN = Direction.FETCH, Direction.WRITE_BACK
#: Bytes per second at which nothing arrives in the time of a test, and at which everything does at once.
NEVER, AT_ONCE = 1.0, 1e15


class Bench:
    """An engine, and tensors to move."""

    def __init__(self, up: float = AT_ONCE, down: float = AT_ONCE, latency: float = 0.0, **options: bool) -> None:
        self.link = Link(up, down, latency)
        self.clock = DeviceClock()
        self.engine = ThrottledTransfers(CPU, self.link, self.clock, **options)
        self.counters = Counters()
        self.ended: list[str] = []

    def submit(
        self,
        direction: Direction,
        nbytes: int = 4096,
        mark: int = 1,
        source: torch.Tensor | None = None,
        **given: object,
    ) -> tuple[Transfer, torch.Tensor]:
        """A transfer of bytes that are all `mark` to a tensor of zeros."""
        source = torch.full((nbytes,), mark, dtype=torch.uint8) if source is None else source
        target = torch.zeros_like(source)
        name = str(mark)
        transfer = self.engine.submit(
            [TensorCopy(source, target)],
            direction,
            self.counters,
            on_done=lambda: self.ended.append(name),
            on_failed=lambda: self.ended.append(f"{name} failed"),
            **given,  # type: ignore[arg-type]
        )
        return transfer, target


def hurry(link: Link) -> None:
    """Let everything arrive."""
    link.up = link.down = AT_ONCE


def wait_for_a_crossing(link: Link) -> None:
    """Some thread waits for the end of a transfer, and follows changes of the rate from now on."""
    end = time.monotonic() + 60
    while not link._changed._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    """Closed at the end, however it comes."""
    made: list[Bench] = []
    yield made
    for bench in made:
        hurry(bench.link)
        bench.engine.close()


def lanes() -> int:
    """Threads of engines."""
    names = {f"kvtier {x}" for x in (UP, DOWN)}
    return sum(thread.name in names for thread in threading.enumerate())


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_takes_at_least_its_time_behind_those_before_it(
    direction: Direction, seed: int, benches: list[Bench]
) -> None:
    rng = random.Random(seed)
    rate, latency = 10 ** rng.uniform(6, 8), rng.choice((0.0, 1e-4, 1e-3))
    bench = Bench(up=rate, down=rate, latency=latency)
    benches.append(bench)
    sizes = [rng.randint(1, 20_000) for _ in range(10)]
    began = time.perf_counter()
    transfers = [bench.submit(direction, n, mark=i + 1) for i, n in enumerate(sizes)]
    due = began
    for i, (transfer, target) in enumerate(transfers):
        transfer.wait()
        due += latency + sizes[i] / rate
        assert time.perf_counter() >= due
        assert (target == i + 1).all()
    assert bench.ended == [str(i + 1) for i in range(10)]
    counters = bench.counters
    seconds = counters.seconds_up if direction is UP else counters.seconds_down
    assert seconds == pytest.approx(counters.seconds_up + counters.seconds_down)
    # What the link was busy: not longer than all this took, however many waited at a time.
    assert (due - began) * 0.999 <= seconds <= time.perf_counter() - began


@pytest.mark.parametrize("poison", [False, True])
def test_bytes_are_there_when_a_transfer_has_ended_and_not_before(poison: bool, benches: list[Bench]) -> None:
    bench = Bench(up=NEVER, poison=poison)
    benches.append(bench)
    transfer, target = bench.submit(UP, mark=7)
    for _ in range(3):
        time.sleep(0.002)
        bench.engine.poll()
        assert transfer.pending
        assert bench.engine.in_flight() == (transfer,)
        assert (target == (0xFF if poison else 0)).all()
    hurry(bench.link)
    transfer.wait()
    assert (target == 7).all()
    assert transfer.state is State.DONE
    assert not bench.engine.in_flight()


@pytest.mark.parametrize(("slow", "fast"), [(UP, DOWN), (DOWN, UP)])
def test_directions_do_not_wait_for_each_other(slow: Direction, fast: Direction, benches: list[Bench]) -> None:
    bench = Bench(**{"up" if slow is UP else "down": NEVER})
    benches.append(bench)
    behind, _ = bench.submit(slow, mark=1)
    first, target = bench.submit(fast, mark=2)
    first.wait()
    assert (target == 2).all()
    assert behind.pending


def test_within_a_direction_nothing_overtakes(benches: list[Bench]) -> None:
    bench = Bench(up=NEVER)
    benches.append(bench)
    transfers = [bench.submit(UP, 5000 - 1000 * i, mark=i + 1)[0] for i in range(4)]
    time.sleep(0.002)
    bench.engine.poll()
    assert bench.ended == []
    hurry(bench.link)
    transfers[-1].block()
    bench.engine.poll()
    assert bench.ended == ["1", "2", "3", "4"]


def test_a_transfer_begins_behind_what_it_comes_after(benches: list[Bench]) -> None:
    """What goes down is fetched again: its copy waits for the other direction."""
    bench = Bench(down=NEVER)
    benches.append(bench)
    down, below = bench.submit(DOWN, mark=9)
    up, above = bench.submit(UP, source=below, after=[down])
    other, _ = bench.submit(UP, mark=3)
    time.sleep(0.002)
    bench.engine.poll()
    assert up.pending
    assert other.pending, "in order"
    hurry(bench.link)
    up.wait()
    assert (above == 9).all()


@pytest.mark.parametrize("given", [True, False])
def test_a_transfer_begins_behind_the_compute_stream(given: bool, benches: list[Bench]) -> None:
    """Behind the points that it is given, or else behind all that the device has to do."""
    bench = Bench(up=1e6)
    benches.append(bench)
    bench.clock.running = True
    bench.clock.run(0.03)
    at = bench.clock.ends
    if given:
        mark = bench.engine.mark()
        assert isinstance(mark, Moment)
        assert mark.at == at
        bench.clock.run(3600.0)
        transfer, _ = bench.submit(UP, 10_000, behind=[mark])
        other = bench.submit(UP, 1, behind=[])[0]
    else:
        transfer, other = bench.submit(UP, 10_000)[0], None
    transfer.wait()
    assert time.perf_counter() >= at + 0.01
    assert bench.counters.seconds_up < 3600, "what it waited for does not count"
    if other is not None:
        other.wait()
    assert time.perf_counter() < at + 1800


def test_an_idle_device_has_nothing_to_wait_for(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    assert bench.engine.mark() is None
    bench.clock.run(3600.0)
    assert bench.engine.mark() is None, "without an emulated device the CPU has computed it"
    bench.clock.running = True
    mark = bench.engine.mark()
    assert mark is not None
    assert not mark.passed()
    assert Moment(time.perf_counter()).passed()


def test_the_rate_changes_under_a_transfer(benches: list[Bench]) -> None:
    bench = Bench(up=1e6)
    benches.append(bench)
    began = time.perf_counter()
    transfer, _ = bench.submit(UP, 40_000)  # 40 ms
    time.sleep(0.02)
    bench.link.up = 2e5
    changed = time.perf_counter()
    left = 40_000 - (changed - began) * 1e6
    transfer.wait()
    if left > 0:  # this thread may have slept too long
        assert time.perf_counter() >= changed + left / 2e5
    bench.link.up = NEVER
    slow, _ = bench.submit(UP, 40_000)
    wait_for_a_crossing(bench.link)
    time.sleep(0.002)
    changed = time.perf_counter()
    bench.link.up = 1e6
    slow.wait()
    assert time.perf_counter() >= changed + 0.0399, "little had moved before"


def test_what_had_crossed_before_the_rate_changed_has_not_to_cross_again() -> None:
    link, ends, nbytes = Link(1e6, 1e6), list[float](), 120_000_000  # takes two minutes if it goes on like this
    began = time.perf_counter()
    crossing = threading.Thread(target=lambda: ends.append(link.cross(UP, began, nbytes, 0.0)))
    crossing.start()
    wait_for_a_crossing(link)
    time.sleep(0.01)
    link.up = 1e9
    seconds = link._since - began
    crossing.join()
    assert ends[0] - began == pytest.approx(seconds + (nbytes - seconds * 1e6) / 1e9)


def test_a_copy_that_raises_is_a_failed_transfer_and_others_go_on(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    benches.append(bench)
    run = TensorCopy.run

    def broken(self: TensorCopy, non_blocking: bool = False) -> None:
        if self.source[0] in (2, 4):
            raise OSError("no link")
        run(self, non_blocking)

    monkeypatch.setattr(TensorCopy, "run", broken)
    transfers = [bench.submit(UP, mark=i)[0] for i in (1, 2, 3, 4)]
    transfers[0].wait()
    with pytest.raises(TransferError, match="no link"):
        transfers[1].wait()
    transfers[2].wait()
    bench.engine.drain()  # says nothing
    assert bench.ended == ["1", "2 failed", "3", "4 failed"]
    assert bench.counters.failed_transfers == 2


def test_closing_waits_for_what_is_in_flight_and_ends_the_threads() -> None:
    before = lanes()
    bench = Bench(up=1e6, down=1e6)
    assert lanes() == before + 2
    began = time.perf_counter()
    targets = [bench.submit(direction, 10_000, mark=5)[1] for direction in (UP, DOWN, UP)]
    bench.engine.close()
    assert time.perf_counter() >= began + 0.02
    assert all((target == 5).all() for target in targets)
    assert bench.ended == ["5"] * 3
    assert lanes() == before
    bench.engine.close()
    bench.engine.drain()


def test_an_engine_that_nobody_closed_leaves_no_thread() -> None:
    before = lanes()
    bench = Bench()
    bench.submit(UP)
    del bench
    gc.collect()
    for _ in range(12_000):
        if lanes() == before:
            return
        time.sleep(0.01)
    raise AssertionError("its threads wait for ever")


def test_an_interrupt_of_a_wait_leaves_the_transfer_in_flight(benches: list[Bench]) -> None:
    bench = Bench(up=NEVER)
    benches.append(bench)
    transfer, target = bench.submit(UP, mark=6)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # it may come before this thread waits
            (signal.setitimer(signal.ITIMER_REAL, 0.02), transfer.wait())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert transfer.pending
    assert bench.engine.in_flight() == (transfer,)
    hurry(bench.link)
    transfer.wait()
    assert (target == 6).all()


def test_what_is_cut_short_before_it_was_submitted_fails_and_nobody_waits_for_it(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    benches.append(bench)

    def cut_short(self: Lane, ticket: Ticket) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "submit", cut_short)
        with pytest.raises(KeyboardInterrupt):
            bench.submit(UP, mark=1)
    bench.submit(UP, mark=2)
    bench.engine.drain()
    assert sorted(bench.ended) == ["1 failed", "2"]
    assert not bench.engine.in_flight()


# What is counted, and a device that is busy


def test_a_stall_is_what_the_device_waits_for_a_fetch(benches: list[Bench]) -> None:
    bench = Bench(up=NEVER, down=1e6)
    benches.append(bench)
    bench.submit(DOWN, 10_000)[0].wait()
    assert bench.counters.stall_seconds == 0.0
    transfer = bench.submit(UP, 10_000)[0]
    ends = transfer.ticket.ended.wait

    def late() -> bool:
        time.sleep(0.01)
        hurry(bench.link)
        return bool(ends())

    transfer.ticket.ended.wait = late
    asked = time.perf_counter()
    transfer.wait()
    assert 0.01 <= bench.counters.stall_seconds <= time.perf_counter() - asked
    before = bench.counters.stall_seconds
    bench.clock.running = True
    bench.clock.run(3600.0)
    bench.submit(UP, 10_000, behind=[])[0].wait()
    assert bench.counters.stall_seconds == before, "the device has work until then"


@pytest.mark.parametrize("running", [False, True])
def test_a_result_takes_its_time_for_the_cpu_or_for_the_device(running: bool, benches: list[Bench]) -> None:
    bench = Bench(up=1e6, latency=0.005)
    benches.append(bench)
    bench.clock.running = running
    began = time.perf_counter()
    transfer, target = bench.submit(Direction.RESULT, 10_000, mark=8)
    transfer.wait()
    assert (target == 8).all()
    reached = bench.clock.ends if running else time.perf_counter()
    assert reached >= began + 0.015
    transfer.synchronize()
    assert time.perf_counter() >= began + 0.015
    assert transfer.state is State.DONE
    assert not bench.engine.in_flight()


def test_a_query_arrives_when_the_device_has_made_it(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    bench.clock.running = True
    bench.clock.run(0.02)
    ready = bench.clock.ends
    bench.clock.attend(3600.0)
    transfer, target = bench.submit(Direction.QUERY, mark=4)
    bench.engine.poll()
    if time.perf_counter() < ready:
        assert transfer.pending
    transfer.block()
    assert time.perf_counter() >= ready
    transfer.synchronize()
    assert (target == 4).all()
    assert time.perf_counter() < ready + 1800, "not behind the attention itself"


def test_a_slower_host_has_its_result_later_and_is_counted_so(benches: list[Bench]) -> None:
    bench = Bench()
    benches.append(bench)
    bench.link.host = 1e6
    for _ in range(3):
        before, seconds = time.perf_counter(), bench.counters.host_seconds
        bench.counters.host_bytes += 10_000
        bench.submit(Direction.QUERY)[0].synchronize()
        bench.counters.host_seconds += 0.001  # what the threads really took
        bench.submit(Direction.RESULT)[0].wait()
        assert time.perf_counter() >= before + 0.01
        assert bench.counters.host_seconds - seconds == pytest.approx(0.01)
    bench.counters.host_bytes += 10
    bench.submit(Direction.QUERY)[0].synchronize()
    bench.counters.host_seconds += 0.5
    bench.submit(Direction.RESULT)[0].wait()
    assert bench.counters.host_seconds == pytest.approx(0.53), "a host that is slower by itself"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"up": 0.0}, {"up": -1.0}, {"up": "fast"}, {"up": "50%"}, {"up": None}, {"down": 0.0}, {"down": "-1GB"}),
        *({"latency": -1.0}, {"latency": "10us"}, {"host": 0.0}, {"host": [1e9]}),
    ],
    ids=str,
)
def test_speeds_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        throttled(**({"up": 1e9} | wrong))
    machine = throttled(1e9)
    for name in ("up", "down"):
        for value in (0.0, "fast"):
            with pytest.raises(ConfigError, match=name):
                setattr(machine.link, name, value)
    assert machine.link.up == machine.link.down == 1e9


def test_speeds_are_written_as_sizes_are() -> None:
    link = throttled("2GB", "1GiB", host="500MB").link
    assert (link.up, link.down, link.host) == (2e9, 2**30, 5e8)
    link.up = "3GB"  # type: ignore[assignment]
    assert link.up == 3e9
