"""How long copies between host and device take, by size, either way, and both ways at once.

Copies are between slots of pools, as transfers make them, each time between others, so that no cache serves them; the
Python that issues them counts. On a CPU both ends are host memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kvtier.calibration.measurements.copies import scattered_pools
from kvtier.calibration.timing import in_turn
from kvtier.planning.fit import held_out_error
from kvtier.planning.hardware.predictors import Curve
from kvtier.transfer.copies import Copy
from kvtier.transfer.engine import Direction

#: Bytes of the smallest and the largest copy; sizes rise by the square root of two.
SMALLEST, LARGEST = 32 * 2**10, 16 * 2**20
#: Bytes at each end, more than caches hold.
ARENA = 128 * 2**20
_PAGE = 4096
#: Of the time for all, the share for both ways at once.
_TOGETHER = 0.2


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What was measured.

    Attributes:
        up, down: (bytes, seconds) of copies to the device and from it.
        together: share of its rate that each direction keeps while the other is busy too.
    """

    up: list[tuple[float, float]]
    down: list[tuple[float, float]]
    together: float


def sizes(smallest: int, largest: int) -> list[int]:
    """Bytes to measure, rising by the square root of two, in whole pages."""
    found, size = [], float(smallest)
    while size <= largest * 1.01:
        found.append(max(round(size / _PAGE), 1) * _PAGE)
        size *= 2**0.5
    return found


def error_of(points: Sequence[tuple[float, float]]) -> float | None:
    """The mean absolute relative error of a curve for sizes left out of it."""
    return held_out_error(lambda some: Curve.fit(some).seconds, points)


class Arena:
    """Memory at both ends of a link, and copies in it.

    Args:
        device: one end.
        nbytes: at each end.

    Raises:
        BudgetError: there is no memory for it.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.near, self.far = scattered_pools(device, _PAGE, nbytes)
        self._random = random.Random(0)
        self.slots = min(self.near.slots, self.far.slots)
        for pool in (self.near, self.far):
            pool.slabs[0].data.fill_(1)  # memory that was never written is no memory yet

    def call(self, nbytes: int, direction: Direction, stream: torch.cuda.Stream | None = None) -> Callable[[], None]:
        """A copy of so many bytes, each time between other places. On a device it is waited for."""
        count = nbytes // _PAGE
        places = self.slots - count

        def copy() -> None:
            at = self._random.randint(0, places)
            near, far = (
                pool.span(pool.slabs[0].base + x, count) for pool, x in ((self.near, at), (self.far, places - at))
            )
            one = Copy(far, near) if direction is Direction.FETCH else Copy(near, far)
            if stream is None:
                one.run()
                return
            with torch.cuda.stream(stream):
                one.run(non_blocking=True)
            stream.synchronize()

        return copy

    def close(self) -> None:
        """Give the memory back."""
        for pool in (self.near, self.far):
            pool.close()


def measure(device: torch.device, seconds: float, *, largest: int | None = None) -> LinkRates:
    """Time copies.

    Args:
        device: one end of the link.
        seconds: for all of it, about.
        largest: bytes of a copy; None: `LARGEST`.

    Raises:
        BudgetError: there is no memory for it.
    """
    steps = sizes(SMALLEST, LARGEST if largest is None else largest)
    arena = Arena(device, max(min(ARENA, 16 * steps[-1]), 2 * steps[-1]))
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        calls = [arena.call(n, way, streams[0]) for way in (Direction.FETCH, Direction.WRITE_BACK) for n in steps]
        times = in_turn(calls, (1 - _TOGETHER) * seconds)
        up, down = times[: len(steps)], times[len(steps) :]
        both = _together(arena, steps[-1], streams, _TOGETHER * seconds)
    finally:
        arena.close()
    pairs = [[(float(n), x) for n, x in zip(steps, some, strict=True)] for some in (up, down)]
    return LinkRates(pairs[0], pairs[1], both)


def _together(arena: Arena, nbytes: int, streams: Sequence[torch.cuda.Stream | None], seconds: float) -> float:
    ways = [
        arena.call(nbytes, way, stream)
        for way, stream in zip((Direction.FETCH, Direction.WRITE_BACK), streams, strict=True)
    ]
    with ThreadPoolExecutor(1, "kvtier-calibrate") as other:

        def both() -> None:
            waiting = other.submit(ways[1])
            ways[0]()
            waiting.result()

        up, down, together = in_turn([*ways, both], seconds)
    return share_kept(up, down, together)


def share_kept(up: float, down: float, together: float) -> float:
    """The share of its rate that each direction keeps: 1 where both take as long as the longer one, a half where they
    take turns. From the seconds of either alone, and of both begun at once."""
    longer, shorter = max(up, down), min(up, down)
    # While both run each moves at the share; then the longer one goes on alone.
    alone = longer - shorter
    share = shorter / max(together - alone, shorter)
    return min(max(share, 0.05), 1.0)


def busy_copies(arena: Arena, nbytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """What keeps the link to the device busy in the background, and what ends that: it raises what a copy raised, for
    then the link was not busy."""
    stream = torch.cuda.Stream(arena.device) if arena.device.type == "cuda" else None
    copy = arena.call(nbytes, Direction.FETCH, stream)
    pool = ThreadPoolExecutor(1, "kvtier-calibrate")
    stop, running = threading.Event(), list[Future[None]]()

    def loop() -> None:
        while not stop.is_set():
            copy()

    def begin() -> None:
        running.append(pool.submit(loop))

    def end() -> None:
        stop.set()
        pool.shutdown()
        for loops in running:
            loops.result()

    return begin, end
