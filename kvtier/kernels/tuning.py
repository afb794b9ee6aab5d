"""Which of a few tiles a kind of call takes: measured once for a machine, at the first such call.

A kind is what a tile is made for: head sizes, dtype, block size, query heads of a KV head, and about how many queries.
Tiles and parts decide the order in which sums are taken, and so the last bits of results. Therefore a choice depends on
nothing that changes from call to call: it is measured on blocks made for that, holds for as long as the process
lives, and is kept on disk for every later one. Where it cannot be measured (a CUDA graph is being captured, memory is
short), the explicit tile holds for as long as the process lives, and nothing is kept.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from kvtier import measured
from kvtier.kernels import launch
from kvtier.kernels.launch import Configuration
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable, Layout

#: Programs per multiprocessor that are tried, the explicit number first.
PROGRAMS = (launch.PROGRAMS, 2, 8)
#: Another tile must take at most so much of the explicit one's time.
GAIN = 0.95

#: Bytes of keys and values that are read, at most and at least: more than a device's caches hold, and than it reads
#: while a call is launched; and the share of free memory at most.
_BYTES, _LEAST_BYTES, _SHARE = 256 * 2**20, 128 * 2**20, 8
#: The same for tiles of many queries, which compute more than they read; and how many rows those get.
_MANY_BYTES, _MANY_ROWS = 32 * 2**20, 4096
#: Rounds at most and at least; between them it ends when so many seconds were spent.
_ROUNDS, _LEAST_ROUNDS, _SECONDS = 31, 3, 0.1
#: Seconds of calls before the first round, and clock cycles of a device that wait for the launches of a round.
_WARM_SECONDS, _WAIT_CYCLES = 0.02, 1_000_000

#: Seconds that a call takes, from some repetitions.
Clock = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True, slots=True)
class Option:
    """A tile, and the programs per multiprocessor that a call of few tiles is split into."""

    tile: Configuration
    programs: int

    def __str__(self) -> str:
        t = self.tile
        return f"{t.rows} x {t.tokens}, {t.warps} warps, {t.stages} stages, {self.programs} programs"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and the seconds that each option took; none where nothing was measured."""

    option: Option
    seconds: dict[Option, float]


@dataclass(frozen=True)
class Blocks:
    """The layout of the blocks that are measured on; see `Layout`."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    block_size: int
    dtype: torch.dtype

    @functools.cached_property
    def k_numel(self) -> int:
        """Elements from the begin of the keys to that of the values."""
        return self.k_heads * self.block_size * self.k_dim


@dataclass(frozen=True, slots=True)
class Trial:
    """The call that is measured: one sequence.

    Attributes:
        layout: of the blocks.
        query: `[1, heads, queries, k_dim]`.
        table: `[1, blocks]`.
        length: tokens.
        params: a scale and a causal limit.
        memory: what the table names.
    """

    layout: Blocks
    query: torch.Tensor
    table: AddressTable
    length: int
    params: AttentionParams
    memory: torch.Tensor


#: Makes the call of a trial with an option, and allocates what it needs.
Prepare = Callable[[Trial, Option], Callable[[], object]]


def candidates(explicit: Configuration, k_dim: int, v_dim: int, itemsize: int) -> list[Configuration]:
    """At most three tiles, the explicit one first: others with fewer tokens, rows, warps or stages.

    They take fewer registers or less shared memory: more programs share a multiprocessor, and smaller devices have room
    for all stages. fp32 has the explicit one only.
    """
    rows, tokens, warps, stages, few = astuple(explicit)
    half = max(16, tokens // 2)
    others: list[tuple[int, int, int, int]] = []
    if itemsize == 4:
        return [explicit]
    if few and rows == 16:
        # At 128 columns fewer stages spill on some devices.
        other = (rows, tokens, 2, stages) if max(k_dim, v_dim) == 128 else (rows, tokens, warps, stages - 2)
        others = [(rows, half, max(2, warps // 2), stages), other]
    elif few:
        others = [(rows, half, warps, stages)]
    else:
        others = [(rows, half, warps, stages), (max(32, rows // 2), tokens, 4 if rows > 32 else warps, stages)]
    return list(dict.fromkeys([explicit, *(Configuration(*x, few=few) for x in others)]))


def chosen(layout: Layout, device: torch.device, group: int, width: int, prepare: Prepare) -> Choice:
    """The option for calls of a kind; measured, if it has to be.

    Args:
        layout: of the blocks; how many heads they have does not matter.
        device: that it is for. Only on CUDA devices is anything measured.
        group: query heads of a KV head.
        width: `launch.width` of the (query, head of a group) rows of a KV head.
        prepare: makes a call of what is to be measured.
    """
    explicit = launch.configuration(layout.k_dim, layout.v_dim, layout.dtype.itemsize, width)
    plain = Choice(Option(explicit, launch.PROGRAMS), {})
    tiles = candidates(explicit, layout.k_dim, layout.v_dim, layout.dtype.itemsize)
    numbers = PROGRAMS if explicit.few else PROGRAMS[:1]
    if len(tiles) * len(numbers) == 1 or not _measures(device) or not measured.wanted():
        return plain
    name = (
        f"attention, {str(layout.dtype).removeprefix('torch.')} heads of {layout.k_dim}/{layout.v_dim}, "
        f"groups of {group}, blocks of {layout.block_size}, {'few' if explicit.few else 'many'} rows in {explicit.rows}"
    )

    def measure() -> list[float]:
        trial = _trial(layout, device, group, width, few=explicit.few)
        choice = choose(tiles, numbers, functools.partial(_seconds, trial, prepare))
        return _packed(choice, tiles, numbers)

    with _choosing:  # two threads that measured would each have a choice of their own
        if (device, name) not in _held:
            _held[device, name] = _remembered(device, name, tiles, numbers, measure) or plain
        return _held[device, name]


#: What holds in this process, by device and kind.
_held: dict[tuple[torch.device, str], Choice] = {}
_choosing = threading.Lock()


def _remembered(
    device: torch.device,
    name: str,
    tiles: Sequence[Configuration],
    numbers: Sequence[int],
    measure: Callable[[], list[float]],
) -> Choice | None:
    """As the disk has it or as measured; None where it cannot be measured."""
    if launch.capturing(device):
        return None
    try:
        with launch.on(device), torch.inference_mode(False), torch.no_grad():
            value = measured.remembered(
                launch.machine(device), name, lambda x: _unpacked(x, tiles, numbers) is not None, measure
            )
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # whatever Triton, its compiler or its driver raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"kvtier's tiles are not measured ({reason[0]}): the usual ones serve, as with {measured.VARIABLE}=off.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return _unpacked(value, tiles, numbers)


def choose(
    tiles: Sequence[Configuration], numbers: Sequence[int], seconds: Callable[[list[Option]], list[float]]
) -> Choice:
    """The best tile with the first of the numbers, then the best number for that tile; the first if none is better.

    Args:
        tiles: the explicit one first.
        numbers: programs per multiprocessor, the explicit one first; none others: they do not matter.
        seconds: measures options against each other; infinite where one does not run.
    """
    taken: dict[Option, float] = {}
    best = _best([Option(tile, numbers[0]) for tile in tiles], seconds, taken)
    if len(numbers) > 1:
        best = _best([Option(best.tile, number) for number in numbers], seconds, taken)
    return Choice(best, taken)


def _best(options: list[Option], seconds: Callable[[list[Option]], list[float]], taken: dict[Option, float]) -> Option:
    if len(options) == 1:
        return options[0]
    times = seconds(options)
    taken.update(zip(options, times, strict=True))
    least = min(times)
    return options[times.index(least)] if least < GAIN * times[0] else options[0]


# On disk: the choice, then what each option took


def _packed(choice: Choice, tiles: Sequence[Configuration], numbers: Sequence[int]) -> list[float]:
    option = choice.option
    order = _tried(option.tile, tiles, numbers)
    seconds = [choice.seconds.get(x, float("inf")) for x in order]
    # JSON has no infinity.
    return [*_numbers(option), *(-1.0 if x == float("inf") else x for x in seconds)]


def _unpacked(value: object, tiles: Sequence[Configuration], numbers: Sequence[int]) -> Choice | None:
    if not isinstance(value, list) or not all(isinstance(x, int | float) for x in value):
        return None
    for tile in tiles:
        for number in numbers:
            option = Option(tile, number)
            order = _tried(tile, tiles, numbers)
            if value[:5] == _numbers(option) and len(value) == 5 + len(order):
                seconds = [x if x >= 0 else float("inf") for x in value[5:]]
                return Choice(option, dict(zip(order, seconds, strict=True)))
    return None


def _numbers(option: Option) -> list[int]:
    tile = option.tile
    return [tile.rows, tile.tokens, tile.warps, tile.stages, option.programs]


def _tried(best: Configuration, tiles: Sequence[Configuration], numbers: Sequence[int]) -> list[Option]:
    return [*(Option(tile, numbers[0]) for tile in tiles), *(Option(best, number) for number in numbers[1:])]


# Measuring


def _trial(layout: Layout, device: torch.device, group: int, width: int, *, few: bool) -> Trial:
    """Blocks of random numbers, some of the device's free memory at most.

    Raises:
        torch.OutOfMemoryError: that is too little.
    """
    widest = max(layout.k_dim, layout.v_dim)
    heads = max(1, min(8, 1024 // widest))
    made = Blocks(heads, heads, layout.k_dim, layout.v_dim, layout.block_size, layout.dtype)
    numel = made.k_numel + heads * made.block_size * made.v_dim
    step = -(-numel * made.dtype.itemsize // 64) * 64
    most = _BYTES if few else _MANY_BYTES
    wanted = min(most, _free(device) // _SHARE)
    if wanted < min(most, _LEAST_BYTES):
        raise torch.OutOfMemoryError(f"{wanted} bytes are too few to measure on.")
    count = max(1, wanted // step)
    generator = torch.Generator(device)  # the user's random numbers stay what they would have been
    generator.manual_seed(0)
    memory = torch.empty(count * step // made.dtype.itemsize, dtype=made.dtype, device=device)
    memory.normal_(generator=generator)
    queries = max(1, (width if few else _MANY_ROWS) // group) if width > 16 else 1
    query = torch.empty((1, heads * group, queries, made.k_dim), dtype=made.dtype, device=device)
    query.normal_(generator=generator)
    # Neighbouring blocks of a sequence seldom are neighbours in memory.
    order = torch.arange(count, device=device).view(1, count).flip(1)
    table = AddressTable(memory.data_ptr() + order * step)
    params = AttentionParams(made.k_dim**-0.5, causal=True)
    return Trial(made, query, table, count * made.block_size, params, memory)


def _seconds(trial: Trial, prepare: Prepare, options: list[Option]) -> list[float]:
    """Medians of the seconds that a call takes with each of the options, measured in turn."""
    few = options[0].tile.few
    calls: list[Callable[[], object] | None] = []
    for i, option in enumerate(options):
        try:
            made = prepare(trial, option)
            made()
            calls.append(made)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a device without the memory for this tile, a compiler that refuses it
            if not i:
                raise
            calls.append(None)
    _warm(next(call for call in calls if call is not None))
    samples: list[list[float]] = [[] for _ in options]
    repeats, spent = 4 if few else 1, 0.0
    for done in range(_ROUNDS):
        for call, sample in zip(calls, samples, strict=True):
            if call is not None:
                sample.append(_clock(call, repeats))
                spent += sample[-1] * repeats
        if done + 1 >= _LEAST_ROUNDS and spent > _SECONDS:
            break
    return [statistics.median(sample) if sample else float("inf") for sample in samples]


def _device_seconds(call: Callable[[], object], repeats: int) -> float:
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
    """Calls for a while: a device that idled raises its clocks by and by, and the first rounds would be slow."""
    until = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < until:
        call()
        torch.cuda.current_stream().synchronize()


_clock: Clock = _device_seconds
_warm = _raise_clocks


def _measures(device: torch.device) -> bool:
    return device.type == "cuda"


def _free(device: torch.device) -> int:
    """Bytes that can be allocated on a device."""
    if device.type != "cuda":
        return _BYTES * _SHARE
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
