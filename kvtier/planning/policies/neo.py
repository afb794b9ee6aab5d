"""Neo's placement: the KV of a sequence is wholly on the device or wholly on the host (sections 3.1 and 3.2).

To compare with. In plain `generate` every sequence is decoded in every step, so that of Neo's schedule remains where
each one is. The device holds as many as it can ("maximizing GPU"). What is on the host hides behind the device's own
attention only ("hiding CPU"), so that no more is there than has to be. It does not form two sub-batches.
"""

from __future__ import annotations

from kvtier.planning.policy import RESERVE_SHARE, Policy
from kvtier.planning.step import LayerPlan, StepPlan, StepState


class WholeSequences(Policy):
    """Every sequence's sealed blocks are on one side: on the device while there is room, else attended to on the host.

    Sequences that are on the device stay there as long as all of them fit; the largest of the others come back first.
    Blocks that sequences share are on the device if one of these is. What host threads cannot attend to in a step is
    fetched for it, as always.

    Args:
        write_through: as of `Policy`.
        ahead: as of `Policy`.
    """

    by_rows = True

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        found = super().plan(state)
        if state.tokens > 1 and not all(x.host_attention for x in state.layers):
            return found  # all of it is read on the device
        # What the next tokens take is kept free, so that no sequence has to give up a part.
        growth = sum([x.sequences * x.block_bytes for x in state.layers])
        layers = [LayerPlan(0 if x.host_attention else x.spilled, self.ahead) for x in state.layers]
        return StepPlan(layers, found.reserve, self.on_host(state, growth))

    def on_host(self, state: StepState, growth: int) -> list[int]:
        """Rows that are on the host: all that do not fit."""
        resident = sum([x.resident * x.block_bytes for x in state.layers])
        room = state.free_bytes + resident - growth
        rows = range(len(state.row_bytes))
        found = set(rows)
        # Whoever is there stays; who comes back leaves some room, or it would soon have to leave again.
        there = [i for i in rows if 2 * state.row_spilled[i] < state.row_bytes[i] or not state.row_bytes[i]]
        others = sorted(found.difference(there), key=lambda i: -state.row_bytes[i])
        for some, spare in ((there, 0), (others, state.device_bytes // RESERVE_SHARE)):
            for i in some:
                if state.row_bytes[i] <= room - spare:
                    room -= state.row_bytes[i]
                    found.remove(i)
        return sorted(found)
