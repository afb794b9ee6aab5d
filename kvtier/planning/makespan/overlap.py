"""How long the link is busy while the host attends, where layers fetch different amounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.planning.makespan.groups import Groups
from kvtier.planning.rates import Rates

#: Layers whose fetches there is room for at a time.
AT_A_TIME = 2
#: Layers whose fetches take so many times as long as others' are not alike: theirs run into the turns of others.
UNEVEN = 1.25
#: The link is as far behind the device as it was in the step before, but for such parts of a layer's linear part.
ALIKE = 1e-6
#: What was played counts again, as long as all that it is of has changed by no more than this: medians do so a little
#: from step to step.
SAME = 5e-3


def is_uneven(on_link: Sequence[float]) -> bool:
    """Whether fetches of some layers take far longer than those of others.

    Args:
        on_link: seconds of a layer's fetch, for each group of layers.
    """
    return max(on_link) > UNEVEN * min(on_link)


class LayerSeconds(NamedTuple):
    """What a layer takes, for each group of layers.

    Attributes:
        on_link: seconds of its fetch.
        alone: of host attention with the link idle.
        attended: of device attention.
    """

    on_link: Sequence[float]
    alone: Sequence[float]
    attended: Sequence[float]


def busy_parts(groups: Groups, rates: Rates, linear: float, each: LayerSeconds) -> list[float]:
    """The part of host attention during which the link is busy, 0 to 1, for each group of layers.

    Plays two steps, of which the first one fills the link. A fetch begins once the layer that fetches `AT_A_TIME`
    before it was read, and behind all other fetches.

    Args:
        groups: of the layers, of which some fetch.
        rates: of the machine.
        linear: seconds of a step besides attention, as long in each layer of the model.
        each: what a layer of each group takes.
    """
    on_link, alone, attended = each
    order, gaps = groups.order, groups.gaps
    own, overhead, shared = linear / sum(gaps), rates.host_overhead, rates.shared
    fetching = [place for place, i in enumerate(order) if on_link[i]]
    # Of each layer that fetches, the one whose fetch begins behind its attention.
    following = [-1] * len(order)
    for place, other in zip(fetching, fetching[AT_A_TIME:] + fetching[:AT_A_TIME], strict=True):
        following[place] = other
    kinds = list(zip(attended, alone, strict=True))
    arrival, busy, behind = [0.0] * len(order), [0.0] * len(order), [-1.0] * len(order)
    now = link = 0.0
    for again in (False, True):
        for place, i in enumerate(order):
            late = link - now if link > now else 0.0
            if again and -ALIKE * own <= late - behind[place] <= ALIKE * own:
                break  # from here on the second step is the first one again
            behind[place] = late
            reads, seconds = kinds[i]
            ready, end = now + gaps[place] * own, arrival[place]
            now = (end if end > ready else ready) + reads
            if seconds:
                part = busy[place] = min((link - ready) / seconds, 1.0) if link > ready else 0.0
                end = ready + overhead + seconds / (1 - shared * part)
                if end > now:
                    now = end
            other = following[place]
            if other >= 0:
                link = arrival[other] = (link if link > now else now) + on_link[order[other]]
    found = [0.0] * len(groups)
    for i, part in zip(order, busy, strict=True):
        found[i] += part / groups[i][1]
    return found


class BusyParts:
    """`busy_parts`, played again for a share where something has changed: it takes longer than all else of a step."""

    def __init__(self) -> None:
        self._groups: Groups | None = None
        self._known: dict[float, tuple[list[float], list[float]]] = {}

    def of(self, share: float, groups: Groups, rates: Rates, linear: float, each: LayerSeconds) -> list[float]:
        """See `busy_parts`; `share`, 0 to 1, is what is fetched of what is spilled."""
        if groups is not self._groups:
            self._groups = groups
            self._known.clear()
        of = [linear, rates.host_overhead, 1 - rates.shared, *each.on_link, *each.alone, *each.attended]
        known = self._known.get(share)
        if known is not None:
            for now, before in zip(of, known[0], strict=True):
                if abs(now - before) > SAME * before:
                    break
            else:
                return known[1]
        parts = busy_parts(groups, rates, linear, each)
        self._known[share] = of, parts
        return parts
