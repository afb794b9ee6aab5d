"""`Policy`: what is fetched and when, what stays on the device, what is evicted and what is written back ahead of need.

The base class is the default. To decide otherwise, override what you want in a file of your own:

    class EvictLeastRecentlyUsed(kvtier.Policy):
        def victims(self, candidates, blocks):
            return self.in_turn(sorted(candidates, key=lambda x: x.last_used), blocks)

    TieredKVCache(model.config, device_budget="4GiB", policy=EvictLeastRecentlyUsed())

A policy gets numbers and returns numbers. It never sees a tensor, and whatever it answers is exact: what does not fit
is not fetched, what must be read is read. An answer that is no decision, such as half a block, is a `ConfigError`, and
the cache goes on. One policy serves all caches of a memory, one call at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvtier.config import parse_count, parse_share
from kvtier.errors import ConfigError
from kvtier.planning.costs import CostModel, Decision, Prediction
from kvtier.planning.rates import Rates
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix
from kvtier.planning.sizing import eviction_batch
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState, whole

T = TypeVar("T")

#: Share of the device budget in use from which sealed blocks are written back, where the user gives none.
WRITE_THROUGH = 0.5
#: Layers ahead of its use at which a fetch may begin.
AHEAD = 4
#: Room for fetches takes at most this part of the device budget.
RESERVE_SHARE = 8


class Candidate(Protocol):
    """Blocks of one layer of one cache, some of which may leave the device.

    Attributes:
        layer: index in the model.
        owner: a number for the cache.
        evictable: blocks that may leave.
        transient: of these, blocks that were fetched for one use, and leave by themselves after it.
        last_used: the memory's clock at the last attention over them. It rises with every forward: of one cache, the
            layers that are still to come in this forward are the least recently used.
    """

    layer: int
    owner: int
    transient: int
    last_used: int

    @property
    def evictable(self) -> int:
        """Blocks that may leave."""


class Victims(NamedTuple):
    """Blocks to evict: so many of a candidate, in the order in which they came to the device, or the latest first."""

    candidate: Candidate
    blocks: int
    latest_first: bool = False


def checked_victims(answer: object) -> Iterator[Victims]:
    """A policy's answer as victims, one by one. Raises ConfigError: it holds something else."""
    if not isinstance(answer, Iterable):
        raise ConfigError(f"The policy's victims are {answer!r}: they have to be a list of Victims.")
    for x in answer:
        if not isinstance(x, tuple) or len(x) != len(Victims._fields):
            shown = f"a tuple of {len(x)}" if isinstance(x, tuple) else f"an object of {type(x).__name__}"
            raise ConfigError(f"Of the policy's victims one is {shown}: it has to be Victims(candidate, blocks).")
        yield Victims(x[0], whole(x[1], "Victims.blocks"), x[2])


def checked_prediction(answer: object) -> Prediction | None:
    """A policy's answer as a prediction. Raises ConfigError: it is none, or expects no number of seconds."""
    if answer is None:
        return None
    if isinstance(answer, Prediction) and isinstance(answer.seconds, int | float) and math.isfinite(answer.seconds):
        return answer
    raise ConfigError(f"The policy's prediction is {answer!r}: it has to be a Prediction of finite seconds, or None.")


class Policy:
    """The default: what is spilled is attended to on the host where it can be, else fetched a few layers ahead; layers
    spill evenly, oldest blocks first; full blocks are written through once half of the device is in use.

    Args:
        write_through: share of the device budget in use from which sealed blocks are copied to the host in the
            background, so that evicting them later moves no bytes.
        ahead: layers ahead of its use at which a fetch may begin.

    Raises:
        ConfigError: `write_through` is no share in [0, 1], or `ahead` no whole number of at least 0.
    """

    #: Whether `StepState.row_bytes` and `row_spilled` are asked for: they take a look at every row's table.
    by_rows = False
    #: Part of the device budget that stays free, with room for the next new blocks, where what could come back to the
    #: device is read where it is. 0.0: all room is used, so that new blocks evict others.
    headroom = 1 / RESERVE_SHARE

    # What a policy of one's own begins with, whose `__init__` does not call this one.
    write_through: float = WRITE_THROUGH
    ahead: int = AHEAD

    def __init__(self, *, write_through: float = WRITE_THROUGH, ahead: int = AHEAD) -> None:
        self.write_through = parse_share("write_through", write_through)
        self.ahead = parse_count("ahead", ahead, 0, "layers")

    def plan(self, state: StepState) -> StepPlan:
        """What to do with spilled blocks in the step that begins.

        Called once a step and device if any blocks are spilled; in a first forward again with each new layer.
        """
        most = max((x.spilled * x.block_bytes for x in state.layers if not x.host_attention), default=0)
        reserve = min(most, state.device_bytes // RESERVE_SHARE)
        # Fetched blocks stay in room that neither fetches nor the next new blocks ask back, evenly over the layers.
        free = state.free_bytes - 2 * reserve
        free += sum([x.fetched * x.block_bytes for x in state.layers])
        # What the host can attend to comes back where much is free, as after `crop`: not what was just evicted.
        fetched = [x for x in state.layers if not x.host_attention]
        if not fetched:
            free -= int(state.device_bytes * self.headroom)
        if fetched or self.headroom:
            free -= sum([x.sequences * x.block_bytes for x in state.layers])
        # A cache that goes on with a parked history does not wait for that before its first token: it comes behind it.
        returning = fetched or (state.layers if state.last is not None else [])
        keep = dict.fromkeys(map(id, state.layers), 0)
        if returning and free > 0:
            block = max(x.block_bytes for x in returning)
            blocks = free // block if fetched or self.headroom else coming_back(free, state.device_bytes, block)
            keep.update({id(x): n for x, n in fill([(x, x.resident, x.spilled) for x in returning], blocks)})
        return StepPlan(
            [LayerPlan(keep[id(x)] if x.host_attention else x.spilled, self.ahead, keep[id(x)]) for x in state.layers],
            reserve,
        )

    def use_rates(self, device: str, rates: Rates) -> None:
        """What is stored of the machine (`kvtier.calibrate`). Called before the first plan on a device, if anything is.

        The default has no use for it: it prices nothing.

        Args:
            device: as in `StepState`.
            rates: as measured; what was not measured is a stated estimate.
        """

    def observe(self, record: StepRecord) -> None:
        """What a step took. Called when the next step of the same cache begins, once something of it was spilled."""

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        """Which blocks leave the device, so that `blocks` slots become free.

        Args:
            candidates: layers of all caches with blocks of the size that is needed.
            blocks: slots needed.

        Returns:
            Victims in the order in which to evict; whoever asks stops when there is room. Fewer blocks than needed are
            allowed where there are no more; where there are, the step is refused for want of room (`BudgetError`).
        """
        return self.evenly(candidates, blocks)

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """How many blocks to copy to the host after `sealed` blocks of a layer were sealed.

        None below the watermark. Above it two for each sealed one: between half the budget and all of it, the backlog
        and the newly sealed then get their copies just in time for the first eviction.
        """
        return 2 * sealed if used_bytes >= self.write_through * device_bytes else 0

    def load_from(self, learned: LoadOrCompute, saved: SavedPrefix) -> int:
        """From which token on what a store has saved is loaded from the disk, when a conversation goes on. Not asked by
        a store that loads all (`loading="always"`). Which is sooner is AdaptiveLLM's question (section 3.4).

        Args:
            learned: seconds that loading bytes and computing tokens took so far, in this process and earlier ones; the
                default asks it.
            saved: a prefix, of which more is on the disk than in memory.

        Returns:
            0: all of it; `saved.length`: nothing, all is computed; in between, a multiple of `saved.step` from
            `saved.past` on: what precedes that is computed while the rest is loaded.
        """
        return learned.choose(saved)

    # What a user sees

    def prediction(self, cache: int, device: str) -> Prediction | None:
        """What the step under way is expected to take on a device; None: nothing is known of it."""
        return None

    def decisions(self, cache: int, device: str | None = None) -> list[Decision]:
        """The last decisions about a cache, the latest last; none where the policy keeps no log."""
        return []

    def model(self, cache: int, device: str | None = None) -> CostModel | None:
        """What was learned about a cache's steps, on any device if none is named; None where nothing is learned."""
        return None

    # Orders to choose from

    @staticmethod
    def evenly(candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        """From the fullest layers, the oldest blocks first, so that all layers stay as full as each other."""
        staying = [Victims(x, n) for x, n in level([(x, x.evictable - x.transient) for x in candidates], blocks)]
        # Where that is not enough, what was fetched goes too, the latest first: it is needed last.
        return [*staying, *(Victims(x, x.transient, latest_first=True) for x in candidates if x.transient)]

    @staticmethod
    def in_turn(candidates: Iterable[Candidate], blocks: int) -> list[Victims]:
        """From the first candidate all that is needed, then from the next."""
        found = []
        for x in candidates:
            n = min(blocks, x.evictable)
            if n:
                found.append(Victims(x, n))
                blocks -= n
        return found


def coming_back(free_bytes: int, device_bytes: int, block_bytes: int) -> int:
    """Blocks that may come back into room that is free: none into what one eviction has freed for new blocks."""
    blocks = free_bytes // block_bytes
    return blocks if blocks >= eviction_batch(device_bytes // block_bytes) else 0


def level(amounts: Sequence[tuple[T, int]], total: int) -> list[tuple[T, int]]:
    """Take `total` from some amounts, from the highest first, so that what is left is as even as can be.

    Returns:
        what is taken from whom, where it is not 0; less than `total` together where there is not so much.
    """
    left = sorted(((n, i) for i, (_, n) in enumerate(amounts) if n > 0), reverse=True)
    total = min(total, sum([n for n, _ in left]))
    if total <= 0:
        return []
    # Lower the highest together to the next one, until enough is taken.
    height, count, taken = left[0][0], 0, 0
    while taken < total:
        while count < len(left) and left[count][0] >= height:
            count += 1
        below = left[count][0] if count < len(left) else 0
        step = min(height - below, -(-(total - taken) // count))
        height -= step
        taken += step * count
    # The last step may have taken one too many from some.
    spare = taken - total
    found = []
    for n, i in reversed(left[:count]):
        give = n - height
        if spare and give:
            give, spare = give - 1, spare - 1
        if give:
            found.append((amounts[i][0], give))
    return found[::-1]


def fill(amounts: Sequence[tuple[T, int, int]], total: int) -> list[tuple[T, int]]:
    """Add `total` to some amounts, to the lowest first, so that they become as even as can be. It undoes `level`.

    Args:
        amounts: each with how much it is, at least 0, and how much may be added to it.
        total: to add.

    Returns:
        what is added to whom, where it is not 0; less than `total` together where no more may be.
    """
    rises: dict[int, int] = {}
    for _, height, most in amounts:
        if most > 0:
            rises[height] = rises.get(height, 0) + 1
            rises[height + most] = rises.get(height + most, 0) - 1
    # Raise the lowest together to the next one, or until one of them may not be raised further.
    height, count, left = 0, 0, total
    for at in sorted(rises):
        if count * (at - height) > left:
            break
        left -= count * (at - height)
        height, count = at, count + rises[at]
    more, spare = divmod(left, count) if count else (0, 0)
    height += more
    found = []
    for item, lowest, most in amounts:
        give = min(max(height - lowest, 0), most)
        if spare and lowest <= height < lowest + most:
            give, spare = give + 1, spare - 1
        if give:
            found.append((item, give))
    return found


__all__ = ["Candidate", "LayerPlan", "LayerState", "Policy", "StepPlan", "StepRecord", "StepState", "Victims"]
