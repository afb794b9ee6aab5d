"""Which tile a kind of attention call takes: the one that calibration stored for the machine, else the explicit one.

A kind is what a tile is made for: head sizes, dtype, block size, query heads of a KV head, and about how many queries.
Tiles and parts decide the order of sums, and so the last bits of results. Therefore a choice depends on nothing that
changes from call to call: it is looked up once, and holds until the process ends. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from kvtier import profile
from kvtier.kernels import launch
from kvtier.kernels.tables import Layout

#: Programs per multiprocessor that calibration tries, the explicit number first.
PROGRAMS = (launch.PROGRAMS, 2, 8)


@dataclass(frozen=True, slots=True)
class Tile:
    """ROWS (query, head) rows by TOKENS tokens, and how Triton lays them out.

    Attributes:
        rows, tokens: of the tile.
        warps, stages: of Triton's program.
        low_query: one tile holds all rows of a KV head (decode, and a few queries more): tokens are walked once, with
            masks, and contexts are split over programs.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    low_query: bool


@dataclass(frozen=True, slots=True)
class Option:
    """A tile, and the programs per multiprocessor that a low-query call is split into, about."""

    tile: Tile
    programs: int

    def __str__(self) -> str:
        t = self.tile
        return f"{t.rows} x {t.tokens}, {t.warps} warps, {t.stages} stages, {self.programs} programs"


@dataclass(frozen=True, slots=True)
class Choice:
    """An option, and the seconds of a call with each option that calibration measured; empty: nothing is stored."""

    option: Option
    seconds: dict[Option, float]


def explicit_tile(k_dim: int, v_dim: int, itemsize: int, rows: int) -> Tile:
    """The tile for so many (query, head of a group) rows of a KV head, where calibration stored no other.

    Keys and values wait for the address of their block, whose load takes half of the stages: of five, the next tile is
    read while one is computed on, of three or four, none is. Where five do not fit, `Launcher` takes fewer.
    """
    widest = max(sum(chunks(k_dim)), sum(chunks(v_dim)))
    # Products in fp32 are made without tensor cores, and take registers by the width of a head.
    tokens = (32 if widest <= 128 else 16) if itemsize == 4 else 64 if widest <= 128 else 32 if widest <= 256 else 16
    if rows <= 16 or (itemsize == 4 and widest > 128):
        # In fp32 even one buffer for such heads is more than the smallest devices have room for.
        stages = 1 if itemsize == 4 and widest > 256 else 5
        return Tile(16, tokens, 4 if widest <= 256 else 8, stages, rows <= 16)
    if rows <= 32 or widest > 256 or itemsize == 4:
        tokens = 16 if itemsize == 4 and widest > 96 else tokens
        stages = 3 if itemsize == 4 else 5
        return Tile(32, tokens, 8 if itemsize == 4 or widest > 256 else 4, stages, rows <= 32)
    if rows <= 64 or widest > 128:
        return Tile(64, tokens, 4 if widest <= 128 else 8, 5, rows <= 64)
    return Tile(128, tokens, 8, 5, False)


def width(rows: int) -> int:
    """Of calls with so many (query, head of a group) rows, one that stands for all that get the same tile."""
    return min(launch.power_of_two(max(rows, 16)), 128)


def chunks(dim: int) -> tuple[int, int]:
    """Two powers of two that hold `dim` columns, the second possibly 0; tensor cores want 16 at least.

    A head of 80 is 64 and 16, of 96 is 64 and 32, of 576 is 512 and 64: nothing is computed in vain.
    """
    main = 1 << (dim.bit_length() - 1)
    if main == dim or main < 16:
        return max(16, launch.power_of_two(dim)), 0
    rest = max(16, launch.power_of_two(dim - main))
    return (2 * main, 0) if rest == main else (main, rest)


def candidates(explicit: Tile, k_dim: int, v_dim: int, itemsize: int) -> list[Tile]:
    """At most three tiles, the explicit one first: others with fewer tokens, rows, warps or stages.

    They take fewer registers or less shared memory: more programs share a multiprocessor, and smaller devices have room
    for all stages. fp32 has the explicit one only.
    """
    rows, tokens, warps, stages, low_query = astuple(explicit)
    half = max(16, tokens // 2)
    others: list[tuple[int, int, int, int]]
    if itemsize == 4:
        return [explicit]
    if low_query and rows == 16:
        # At 128 columns, with fewer stages registers spill on some devices.
        other = (rows, tokens, 2, stages) if max(k_dim, v_dim) == 128 else (rows, tokens, warps, stages - 2)
        others = [(rows, half, max(2, warps // 2), stages), other]
    elif low_query:
        others = [(rows, half, warps, stages)]
    else:
        others = [(rows, half, warps, stages), (max(32, rows // 2), tokens, 4 if rows > 32 else warps, stages)]
    return list(dict.fromkeys([explicit, *(Tile(*x, low_query=low_query) for x in others)]))


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that take the same tile.

    Attributes:
        layout: of the blocks; how many heads they have does not matter.
        group: query heads of a KV head.
        width: `width` of the (query, head of a group) rows of a KV head.
    """

    layout: Layout
    group: int
    width: int

    @property
    def explicit(self) -> Tile:
        """The tile where nothing is stored."""
        x = self.layout
        return explicit_tile(x.k_dim, x.v_dim, x.dtype.itemsize, self.width)

    @property
    def tiles(self) -> list[Tile]:
        """The candidates, the explicit tile first."""
        x = self.layout
        return candidates(self.explicit, x.k_dim, x.v_dim, x.dtype.itemsize)

    @property
    def programs(self) -> tuple[int, ...]:
        """Programs per multiprocessor to try; one number only where contexts are not split."""
        return PROGRAMS if self.explicit.low_query else PROGRAMS[:1]

    @property
    def has_alternatives(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.tiles) * len(self.programs) > 1

    @property
    def name(self) -> str:
        """For the profile."""
        x, tile = self.layout, self.explicit
        return (
            f"attention tile, {str(x.dtype).removeprefix('torch.')} heads of {x.k_dim}/{x.v_dim}, groups of "
            f"{self.group}, blocks of {x.block_size}, {'low-query' if tile.low_query else 'prefill'}, {tile.rows} rows"
        )


#: What this process has chosen, by device and kind.
_chosen: dict[tuple[torch.device, str], Choice] = {}


def chosen(kind: Kind, device: torch.device) -> Choice:
    """The stored choice for calls of a kind on a device, the explicit one without; the same until the process ends."""
    name = kind.name
    found = _chosen.get((device, name))
    if found is None:
        stored = None
        if kind.has_alternatives:
            value = profile.lookup(launch.machine(device), name, lambda x: unpacked(x, kind) is not None)
            stored = unpacked(value, kind)
        plain = Choice(Option(kind.explicit, PROGRAMS[0]), {})
        found = _chosen.setdefault((device, name), stored or plain)  # two threads get one choice
    return found


def in_use() -> frozenset[tuple[torch.device, str]]:
    """Devices and names of the kinds that this process has chosen for: a new profile changes nothing for them."""
    return frozenset(_chosen)


# In the profile: the option, then the seconds of each option


def packed(choice: Choice, kind: Kind) -> list[float]:
    """A choice as the profile holds it. An option that does not run takes -1: JSON has no infinity."""
    seconds = [choice.seconds.get(x, float("inf")) for x in _measured(choice.option.tile, kind.tiles, kind.programs)]
    return [*_numbers(choice.option), *(-1.0 if x == float("inf") else x for x in seconds)]


def unpacked(value: object, kind: Kind) -> Choice | None:
    """The choice that the profile holds; None where the value is no choice among the options of today."""
    if not isinstance(value, list) or not all(isinstance(x, int | float) for x in value):
        return None
    tiles, programs = kind.tiles, kind.programs
    for option in (Option(tile, number) for tile in tiles for number in programs):
        measured = _measured(option.tile, tiles, programs)
        if value[:5] == _numbers(option) and len(value) == 5 + len(measured):
            seconds = [x if x >= 0 else float("inf") for x in value[5:]]
            return Choice(option, dict(zip(measured, seconds, strict=True)))
    return None


def _numbers(option: Option) -> list[int]:
    tile = option.tile
    return [tile.rows, tile.tokens, tile.warps, tile.stages, option.programs]


def _measured(best: Tile, tiles: Sequence[Tile], programs: Sequence[int]) -> list[Option]:
    """The options in the order in which calibration measures them."""
    return [*(Option(tile, programs[0]) for tile in tiles), *(Option(best, number) for number in programs[1:])]
