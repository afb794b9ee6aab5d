"""Which tile is fastest for a kind of attention call: the candidates are timed on the device against each other.

The calls read random blocks made for that: more than caches hold, in no order, and of as many heads as fill a device.
What is timed is the device, not Python: it waits until all that is timed is in its queue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.calibration.shapes import Shape
from kvtier.kernels import paged, tiles
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.kernels.tiles import Choice, Kind, Option
from kvtier.memory.storage.layout import BlockLayout

#: Another option must take at most so much of the explicit one's time.
GAIN = 0.95

#: Bytes of keys and values that a low-query call reads, at most and at least: more than a device's caches hold, and
#: than it reads while a call is launched; and the share of free memory at most.
_BYTES, _LEAST_BYTES, _SHARE = 256 * 2**20, 128 * 2**20, 8
#: The same for prefill, which computes more than it reads; and how many (query, head of a group) rows it gets.
_PREFILL_BYTES, _PREFILL_ROWS = 32 * 2**20, 4096
#: Rounds at most and at least; between them it ends when so many seconds were spent.
_ROUNDS, _LEAST_ROUNDS, _SECONDS = 31, 3, 0.1
#: Seconds of calls before the first round, and clock cycles for which a device waits for the launches of a round.
_WARM_SECONDS, _WAIT_CYCLES = 0.02, 1_000_000

#: Seconds that a call takes, from some repetitions.
Clock = Callable[[Callable[[], object], int], float]


def kinds_of(shape: Shape, block_size: int, *, all_widths: bool) -> Iterator[Kind]:
    """The kinds of calls that layers of a shape make and for which there is a choice: decode, prefill, then others."""
    heads = _heads(shape)
    layout = BlockLayout(heads, heads, shape.k_dim, shape.v_dim, block_size, shape.dtype)
    widths = [tiles.width(shape.group), 128, *((16, 32, 64) if all_widths else ())]
    names: set[str] = set()
    for width in widths:
        kind = Kind(layout, shape.group, width)
        if width >= widths[0] and kind.has_alternatives and kind.name not in names:
            names.add(kind.name)
            yield kind


def _heads(shape: Shape) -> int:
    return max(1, min(8, 1024 // max(shape.k_dim, shape.v_dim)))


def measure(kind: Kind, device: torch.device) -> Choice:
    """Time the options for calls of a kind on a device, for some tenths of a second and the time to compile.

    Raises:
        torch.OutOfMemoryError: an eighth of the free memory is too little to measure on.
        Exception: whatever Triton, its compiler or its driver raise for the explicit tile.
    """
    trial = _trial(kind, device)
    return choose(kind, lambda options: _seconds(trial, options))


def choose(kind: Kind, seconds: Callable[[list[Option]], list[float]]) -> Choice:
    """The best tile with the explicit number of programs, then the best number for it; the first if none is better.

    Args:
        kind: whose options.
        seconds: measures options against each other; infinite where one does not run.
    """
    found: dict[Option, float] = {}
    best = _best([Option(tile, kind.programs[0]) for tile in kind.tiles], seconds, found)
    if len(kind.programs) > 1:
        best = _best([Option(best.tile, number) for number in kind.programs], seconds, found)
    return Choice(best, found)


def _best(options: list[Option], seconds: Callable[[list[Option]], list[float]], found: dict[Option, float]) -> Option:
    if len(options) == 1:
        return options[0]
    times = seconds(options)
    found.update(zip(options, times, strict=True))
    least = min(times)
    return options[times.index(least)] if least < GAIN * times[0] else options[0]


@dataclass(frozen=True, slots=True)
class Trial:
    """The call that is timed: attention of one sequence.

    Attributes:
        layout: of the blocks.
        query: `[1, heads, queries, k_dim]`.
        table: `[1, blocks]`.
        length: tokens.
        params: a scale and a causal limit.
        memory: of the blocks.
    """

    layout: BlockLayout
    query: torch.Tensor
    table: AddressTable
    length: int
    params: AttentionParams
    memory: torch.Tensor

    def call(self, option: Option) -> Callable[[], object]:
        """What makes the call with an option."""
        attend = paged.Prepared(self.layout, option=option)
        return lambda: attend(self.query, self.table, self.length, self.params)


def _trial(kind: Kind, device: torch.device) -> Trial:
    """Blocks of random numbers, in an eighth of the device's free memory at most.

    Raises:
        torch.OutOfMemoryError: that is too little.
    """
    layout, group, low_query = kind.layout, kind.group, kind.explicit.low_query
    assert isinstance(layout, BlockLayout)
    most = _BYTES if low_query else _PREFILL_BYTES
    nbytes = min(most, free_bytes(device) // _SHARE)
    if nbytes < min(most, _LEAST_BYTES):
        raise torch.OutOfMemoryError(f"{nbytes} bytes are too few to measure on.")
    count = max(1, nbytes // layout.nbytes)
    generator = torch.Generator(device)  # the user's random numbers stay what they would have been
    generator.manual_seed(0)
    memory = torch.empty(count * layout.nbytes // layout.dtype.itemsize, dtype=layout.dtype, device=device)
    memory.normal_(generator=generator)
    queries = max(1, (kind.width if low_query else _PREFILL_ROWS) // group) if kind.width > 16 else 1
    query = torch.empty((1, layout.k_heads * group, queries, layout.k_dim), dtype=layout.dtype, device=device)
    query.normal_(generator=generator)
    # Neighbouring blocks of a sequence seldom are neighbours in memory.
    order = torch.arange(count, device=device).view(1, count).flip(1)
    table = AddressTable(memory.data_ptr() + order * layout.nbytes)
    params = AttentionParams(layout.k_dim**-0.5, causal=True)
    return Trial(layout, query, table, count * layout.block_size, params, memory)


def _seconds(trial: Trial, options: Sequence[Option]) -> list[float]:
    """Medians of the seconds that the call takes with each of the options, measured in turn."""
    calls: list[Callable[[], object] | None] = []
    for i, option in enumerate(options):
        try:
            call = trial.call(option)
            call()
            calls.append(call)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a device without the memory for this tile, a compiler that refuses it
            if not i:
                raise
            calls.append(None)
    _warm(next(call for call in calls if call is not None))
    samples: list[list[float]] = [[] for _ in options]
    repeats, spent = 4 if options[0].tile.low_query else 1, 0.0
    for done in range(_ROUNDS):
        for each, sample in zip(calls, samples, strict=True):
            if each is not None:
                sample.append(_clock(each, repeats))
                spent += sample[-1] * repeats
        if done + 1 >= _LEAST_ROUNDS and spent > _SECONDS:
            break
    return [statistics.median(sample) if sample else float("inf") for sample in samples]


def device_seconds(call: Callable[[], object], repeats: int) -> float:
    """Seconds of a call on the device, without those that Python takes to launch it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A call may take no longer than its launch: the device waits until all that is timed is in its queue.
    call()
    if (wait := getattr(torch.cuda, "_sleep", None)) is not None:
        wait(_WAIT_CYCLES)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _raise_clocks(call: Callable[[], object]) -> None:
    """Make calls for a while: a device that idled raises its clocks slowly, and the first rounds would be slow."""
    until = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < until:
        call()
        torch.cuda.current_stream().synchronize()


_clock: Clock = device_seconds
_warm = _raise_clocks


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device."""
    if device.type != "cuda":
        return _BYTES * _SHARE
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
