"""Policies that fetch a fixed share of what is spilled: simple ways, and baselines for those that choose."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.config import parse_share
from kvtier.planning.makespan.groups import Groups
from kvtier.planning.policy import WRITE_THROUGH, Policy, coming_back, fill
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepState

#: Layers whose fetched blocks there is room for at a time: one is read, one arrives.
DEPTH = 2
#: Room for fetches takes at most this part of the device budget.
MOST_ROOM = 2
#: How often it is looked what room is needed for what is spilled for room, as it is from step to step.
LOOKS = 24
#: Blocks of each sequence that may spill between a plan and the use of what it fetches.
MARGIN = 2
#: What comes back is at most one in so many of a layer's spilled blocks a step, where the share itself fetches fewer: a
#: step waits for what it fetches.
RETURN = 4


class FixedShare(Policy):
    """Fetches one share of every layer's spilled blocks ahead of need; the host attends to the rest.

    Args:
        share: 0: all is attended to on the host; 1: all is fetched.
        write_through: as of `Policy`.

    Raises:
        ConfigError: `share` is no share in [0, 1]; or as of `Policy`.
    """

    # A larger share needed more room: all of it is used again.
    headroom = 0.0

    def __init__(self, share: float, *, write_through: float = WRITE_THROUGH) -> None:
        super().__init__(write_through=write_through, ahead=DEPTH)
        self.share = parse_share("share", share)

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        return self.plan_of(state, self.share)

    def plan_of(self, state: StepState, share: float) -> StepPlan:
        """The plan that fetches a share, in slots that are kept free for it."""
        fetch = [_to_fetch(x, share, x.spilled) for x in state.layers]
        largest = max((n * x.block_bytes for n, x in zip(fetch, state.layers, strict=True)), default=0)
        if not largest:
            return super().plan(state)  # what comes back where much is free
        reserve = min(DEPTH * largest, state.device_bytes // MOST_ROOM)
        if share < 1:  # all is asked for with what spills while the step goes on, as far as there is room
            fetch = [
                n + MARGIN * x.sequences if 0 < n == x.spilled else n for n, x in zip(fetch, state.layers, strict=True)
            ]
        # What was spilled for a larger share comes back.
        spare = state.free_bytes - reserve + sum([x.fetched * x.block_bytes for x in state.layers])
        keep = [0] * len(fetch)
        block = max(x.block_bytes for x in state.layers)
        blocks = coming_back(spare, state.device_bytes, block) if spare >= block else 0
        if blocks:
            for i, n in fill([(i, x.resident, x.spilled) for i, x in enumerate(state.layers)], blocks):
                # A first token waits for nothing that only comes back: see `Policy.plan`.
                more = -(-state.layers[i].spilled // RETURN) if state.last is not None else 0
                keep[i] = min(n, max(fetch[i], more))
                fetch[i] = max(fetch[i], keep[i])
        return StepPlan([LayerPlan(n, x, k) for n, x, k in zip(fetch, _ahead(fetch), keep, strict=True)], reserve)


def all_attend() -> FixedShare:
    """What is spilled is attended to where it is (Neo's host attention for every sequence)."""
    return FixedShare(0.0)


def all_fetch() -> FixedShare:
    """What is spilled is fetched for each step (offloading as it is usual)."""
    return FixedShare(1.0)


def room_for(groups: Groups, share: float, device_bytes: int, reserve: int = 0) -> int:
    """Bytes that `FixedShare` keeps free for a share of what layers have spilled, once they have spilled for it too; or
    once that has come back for which less is kept free than now.

    Args:
        groups: of the layers, with so much kept free as `reserve` says; see `alike`.
        share: 0 to 1.
        device_bytes: the device budget.
        reserve: bytes that are kept free now.
    """
    most = device_bytes // MOST_ROOM
    room = min(DEPTH * _largest(groups, share), most)
    for _ in range(LOOKS if room else 0):
        # Blocks are whole, and the largest fetch is of a layer that has spilled one more than others.
        before, room = room, min(DEPTH * _largest(groups, share, room - reserve), most)
        if room == before:
            break
    return room


def room_of(groups: Groups, share: float, device_bytes: int) -> int:
    """Bytes that `FixedShare` keeps free for a share that layers have spilled for already."""
    return min(DEPTH * _largest(groups, share), device_bytes // MOST_ROOM)


def _ahead(fetch: Sequence[int]) -> list[int]:
    """Layers before each at which its fetch begins: once the layer was read whose room it takes, of those that fetch
    the one `DEPTH` before it. Where only some layers have spilled, others are between."""
    layers = len(fetch)
    if all(fetch):
        return [min(DEPTH, layers)] * layers  # as below, in less time: it is asked for at most steps
    found = [0] * layers
    places = [i for i, n in enumerate(fetch) if n]
    for j, i in enumerate(places):
        found[i] = (i - places[j - DEPTH]) % layers or layers if len(places) > DEPTH else layers
    return found


def _largest(groups: Groups, share: float, more: int = 0) -> int:
    """Bytes of the largest fetch of a layer, once so many more are kept free."""
    return max([_to_fetch(x, share, n) * x.block_bytes for x, n in groups.most_spilled(more)], default=0)


def _to_fetch(layer: LayerState, share: float, spilled: int) -> int:
    """Blocks of so many spilled ones that there is to be room for. All means all, also of what spills while the step
    goes on. What is all of a few blocks only because these are whole needs no more room: with that there were more of
    them, of which it is not all, and room would go to and fro."""
    if share < 1 and layer.host_attention:
        return int(spilled * share + 0.5)
    return spilled + MARGIN * layer.sequences if spilled else 0
