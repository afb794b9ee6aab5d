"""While how much of host attention the link is busy, where layers fetch different amounts."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.planning.groups import Groups
from kvtier.planning.rates import Rates

#: Layers whose fetches there is room for at a time.
AT_A_TIME = 2
#: Fetches that differ so much run into the turns of other layers.
UNEVEN = 1.25


def is_uneven(nbytes: Sequence[float]) -> bool:
    """Whether layers of some kinds fetch far more than others, or than those that fetch nothing."""
    return max(nbytes) > UNEVEN * min(nbytes)


def busy_parts(
    groups: Groups,
    rates: Rates,
    linear: float,
    on_link: Sequence[float],
    alone: Sequence[float],
    attended: Sequence[float],
) -> list[float]:
    """Of each group the part of its host attention during which the link is busy.

    Plays two steps: the fetch for a layer begins when the one that is `AT_A_TIME` fetches before it was read, and the
    link is free.

    Args:
        groups: of the layers.
        rates: of the machine.
        linear: seconds of a step besides attention.
        on_link, alone, attended: of a layer of each group, the seconds of its fetch, of host attention with the link
            idle, and of device attention.
    """
    order, gaps = groups.order, groups.gaps
    each = linear / sum(gaps)
    fetching = [place for place, i in enumerate(order) if on_link[i]]
    # Behind each place, what is fetched next.
    behind = {place: fetching[(n + AT_A_TIME) % len(fetching)] for n, place in enumerate(fetching)}
    arrival = [0.0] * len(order)
    found, now, up = [0.0] * len(groups), 0.0, 0.0
    for turn in range(2):
        for place, i in enumerate(order):
            ready = now + gaps[place] * each
            now = max(ready, arrival[place]) + attended[i]
            if alone[i]:
                busy = min(max(up - ready, 0.0) / alone[i], 1.0)
                now = max(now, ready + rates.host_overhead + alone[i] / (1 - rates.shared * busy))
                if turn:
                    found[i] += busy / groups[i][1]
            if on_link[i]:
                next_one = behind[place]
                up = max(now, up) + on_link[order[next_one]]
                arrival[next_one] = up
    return found
