"""A policy as a user writes it, in a file of its own: the layers whose attention is longest ago give way first."""

import kvtier


class EvictLeastRecentlyUsed(kvtier.Policy):
    """The least recently used layer gives up all that is needed, then the next."""

    def victims(self, candidates, blocks):  # type: ignore[no-untyped-def]
        """See `kvtier.Policy.victims`."""
        return self.in_turn(sorted(candidates, key=lambda x: x.last_used), blocks)
