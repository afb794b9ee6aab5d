"""Policies that fetch a fixed share of what is spilled: simple ways, and baselines for those that choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.config import parse_share
from kvtier.planning.makespan.groups import Group, fetched_blocks, raised_to
from kvtier.planning.policy import WRITE_THROUGH, Policy, coming_back, fill
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepState

#: Layers whose fetched blocks there is room for at a time: one is read, one arrives.
DEPTH = 2
#: Room for fetches takes at most this part of the device budget.
MOST_ROOM = 2
#: How often it is looked what less room needs: each time there is less to come back.
LOOKS = 8
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
        fetch = [_to_fetch(x, share) for x in state.layers]
        largest = max((n * x.block_bytes for n, x in zip(fetch, state.layers, strict=True)), default=0)
        if not largest:
            return super().plan(state)  # what comes back where much is free
        reserve = min(DEPTH * largest, state.device_bytes // MOST_ROOM)
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


def room_for(groups: Sequence[Group], share: float, device_bytes: int, reserve: int = 0) -> int:
    """Bytes that `FixedShare` keeps free for a share of what layers have spilled, once they have spilled for it too.

    Args:
        groups: of the layers, with so much kept free as `reserve` says; see `alike`.
        share: 0 to 1.
        device_bytes: the device budget.
        reserve: bytes that are kept free now.
    """
    room = float(DEPTH * _largest(groups, share))
    if not room:
        return 0
    if room < reserve:
        return int(min(_room_left(groups, share, room, reserve), device_bytes // MOST_ROOM))
    # What is kept free besides is spilled by the fullest layers, and the same share of that needs room again: of the
    # fullest alone until they are as full as the next ones, of these and the next ones then.
    heights = sorted([(x.resident * x.block_bytes, count, x.block_bytes) for x, count in groups], reverse=True)
    layers, lowered, depth, found = 0, 0.0, 0.0, room
    for i, (height, count, block) in enumerate(heights):
        below = heights[i + 1][0] if i + 1 < len(heights) else 0
        layers += count
        if height - below <= block and i + 1 < len(heights):
            lowered += layers * (height - below)
            continue  # as full as each other, but for a block, which the fullest has spilled less
        each = DEPTH * share / layers
        begun = room + DEPTH * share * depth - each * (reserve + lowered)
        found = max(begun / (1 - each), 0.0) if each < 1 else math.inf
        depth, lowered = depth + height - below, lowered + layers * (height - below)
        if found - reserve <= lowered:
            break
    return int(min(found, device_bytes // MOST_ROOM))


def _room_left(groups: Sequence[Group], share: float, room: float, reserve: int) -> float:
    """Bytes that are kept free where that is less than now: the rest comes back to the layers that have least on the
    device, and of what these have spilled then the share is less, and needs less room.

    Args:
        groups, share, reserve: as of `room_for`.
        room: for the share of what is spilled now.
    """
    kinds = [(x.resident * x.block_bytes, x.spilled * x.block_bytes, count) for x, count in groups]
    block = max([x.block_bytes for x, _ in groups])
    for _ in range(LOOKS):
        height, most = raised_to(kinds, reserve - room), 0.0
        for (layer, _), (held, spilled, _) in zip(groups, kinds, strict=True):
            left = min(max(held + spilled - height, 0), spilled)
            whole = share == 1 or not layer.host_attention
            more = MARGIN * layer.sequences * layer.block_bytes if whole and left else 0
            most = max(most, (left if whole else left * share) + more)
        before, room = room, min(DEPTH * most, room)
        if before - room < block:
            break
    return room


def room_of(groups: Sequence[Group], share: float, device_bytes: int) -> int:
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


def _largest(groups: Sequence[Group], share: float) -> int:
    """Bytes of the largest fetch of a layer."""
    return max([_to_fetch(x, share) * x.block_bytes for x, _ in groups], default=0)


def _to_fetch(layer: LayerState, share: float) -> int:
    """Blocks that a plan asks for. All means all, also of what spills while the step goes on."""
    blocks = fetched_blocks(layer, share)
    return blocks + MARGIN * layer.sequences if blocks and blocks == layer.spilled else blocks
