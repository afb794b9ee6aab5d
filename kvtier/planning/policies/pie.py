"""Pie's swapping of whole layers in FIFO order (section 3.3), as plans of steps.

To compare with. `rotation.py` has the protocol on a clock of its own; here the same rule says, once a step, which
layers leave after they were read, and the step's schedule brings back the one that is needed next whenever there is
room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.planning.policies.rotation import Rotation
from kvtier.planning.policy import WRITE_THROUGH, Candidate, Policy, Victims
from kvtier.planning.rates import Median
from kvtier.planning.step import LayerPlan, StepPlan, StepRecord, StepState

#: Caches whose phase is kept, the latest ones.
CACHES = 256


class WholeLayers(Policy):
    """Whole layers are fetched ahead of their use and stay; whenever the link is free, the layer that was just read
    leaves for the one on the host that is needed next.

    On the host are as many layers as the device has no room for: a larger expansion (section 3.4.2) would make room for
    more sequences, and a forward has those that it has. Giving up a layer that was written through moves no bytes, so
    that the room which it leaves is the buffer for the one that comes; Pie needs two on each side.

    Args:
        write_through: as of `Policy`.
    """

    def __init__(self, *, write_through: float = WRITE_THROUGH) -> None:
        super().__init__(write_through=write_through)
        self._up, self._layer = Median(), Median()
        #: Of each cache and device, for how many computations of a layer the link is busy when its next step begins.
        self._busy: dict[tuple[int, str], float] = {}

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        sizes = [x.resident + x.spilled for x in state.layers]
        key = (state.cache, state.device)
        away = [x.spilled > x.fetched for x in state.layers]
        leaving, busy = self.leaving(away, self._swap(state, sizes), self._busy.pop(key, 0.0))
        self._busy[key] = busy  # the latest last
        if len(self._busy) > CACHES:
            del self._busy[next(iter(self._busy))]
        ahead = max(len(sizes) - 1, 1)
        layers = []
        for x, size, leaves in zip(state.layers, sizes, leaving, strict=True):
            # All of it, also what spills before it is fetched.
            whole = size + 2 * x.sequences
            layers.append(LayerPlan(whole, ahead, whole, whole if leaves else 0))
        return StepPlan(layers)

    def leaving(self, away: Sequence[bool], swap: float, busy: float = 0.0) -> tuple[list[bool], float]:
        """Which layers leave after they were read.

        Args:
            away: layers that are on the host as the step begins.
            swap: what bringing one takes, in computations of a layer.
            busy: for how long the link is busy when the step begins, in the same unit.

        Returns:
            Which, and for how long the link is busy when the next step begins.
        """
        n = len(away)
        rule = Rotation(n, sum(away))
        host = {i + 1 for i, x in enumerate(away) if x}
        device = set(range(1, n + 1)) - host
        found, free = [False] * n, busy
        for now in range(1, n + 1):
            if now in host:
                host.discard(now)
                device.add(now)
            following = now % n + 1
            # The link is free, and what was just read is the coldest: it makes room for the hottest.
            if host and free <= now and n > 1 and rule.swap_out(following, device, host) == now:
                hottest = rule.swap_in(following, host)
                assert hottest is not None
                host.discard(hottest)
                device.add(hottest)
                device.discard(now)
                host.add(now)
                found[now - 1] = True
                free = now + swap
        return found, max(free - n, 0.0)

    def observe(self, record: StepRecord) -> None:
        """See `Policy.observe`."""
        if record.bytes_up and record.seconds_up > 0:
            self._up.add(record.bytes_up / record.seconds_up)
        if record.layers and record.seconds > record.stall_seconds:
            self._layer.add((record.seconds - record.stall_seconds) / record.layers)

    def _swap(self, state: StepState, sizes: Sequence[int]) -> float:
        """What bringing a layer takes, in computations of a layer; 0 where nothing was measured."""
        if not (self._up.value and self._layer.value):
            return 0.0
        nbytes = max(size * x.block_bytes for size, x in zip(sizes, state.layers, strict=True))
        return nbytes / self._up.value / self._layer.value

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        """See `Policy.victims`: the coldest layers, which were read last, whole."""
        return self.in_turn(sorted(candidates, key=lambda x: (x.last_used, x.layer), reverse=True), blocks)
