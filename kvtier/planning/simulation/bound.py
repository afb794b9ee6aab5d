"""A bound from below on the seconds of a simulated run: no policy is faster, whatever it knows of the future."""

from __future__ import annotations

from kvtier.planning.simulation.simulate import Load, Machine

#: Weights of computation against the link that are tried; the best one found gives the bound.
_WEIGHTS = 200


def lower_bound(load: Load, machine: Machine, steps: int) -> float:
    """Seconds that so many steps take at least.

    The link and the device each take part of a step. A run takes at least any weighted mean of what both of them take,
    each step with the fetches that are best for this mean (the dual of a linear program). It assumes that nothing is
    kept free for fetches, that the host is not slower while the link is busy, and that nothing waits for its turn. A
    layer's host attention is charged the part of its overhead that it is of the layer's blocks: a policy that keeps
    some layers whole pays the overhead in the others only.

    Args:
        load: as of the simulation.
        machine: its traffic is counted; noise is taken at its mean.
        steps: to decode.
    """
    points = [_points(load, machine, number) for number in range(steps)]
    best = 0.0
    for i in range(_WEIGHTS + 1):
        weight = i / _WEIGHTS
        best = max(best, sum(min(weight * device + (1 - weight) * link for device, link in some) for some in points))
    return best


def _points(load: Load, machine: Machine, number: int) -> list[tuple[float, float]]:
    """Seconds of the device and of the link for what may be best to fetch: between these points both are linear."""
    rates, block = machine.rates, load.block_bytes
    sealed = (load.context + (number + 1) * load.tokens) // load.block_size * load.sequences * block
    slots = load.device_bytes // block - load.layers * load.sequences
    resident = min(sealed, slots * block / load.layers)
    spilled = max(sealed - resident, 0.0)
    rate = rates.up * machine.link_left(number)

    # Convex in what a layer has on the device, so that no uneven placement over the layers is faster than an even one.
    per_byte = 1 / rates.host + (rates.host_overhead / sealed if sealed else 0.0)
    here = resident + load.sequences * block

    def seconds(fetched: float) -> tuple[float, float]:
        attention = max((here + fetched) / rates.device, (spilled - fetched) * per_byte)
        return load.layers * (load.linear + attention), load.layers * fetched / rate

    # Where device attention takes as long as host attention.
    meet = (spilled * per_byte - here / rates.device) / (per_byte + 1 / rates.device)
    return [seconds(x) for x in {0.0, min(max(meet, 0.0), spilled), spilled}]
