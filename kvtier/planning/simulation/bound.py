"""A bound from below on the seconds of a simulated run: no policy is faster, whatever it knows of the future."""

from __future__ import annotations

from kvtier.planning.simulation.simulate import Load, Machine

#: Weights of computation against the link that are tried; the best one found gives the bound.
_WEIGHTS = 200


def lower_bound(load: Load, machine: Machine, steps: int) -> float:
    """Seconds that so many steps take at least.

    The link and the device each take part of a step. A run takes at least any weighted mean of what both of them take,
    each step with the fetches that are best for this mean (the dual of a linear program). It assumes that any blocks
    may be on the device, that nothing is kept free for fetches, that the host is not slower while the link is busy, and
    that nothing waits for its turn. A layer's host attention is charged the part of its overhead that it is of the
    layer's blocks, and a fetch likewise: a policy that keeps some layers whole pays the overhead in the others only.

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
    blocks = (load.context + (number + 1) * load.tokens) // load.block_size
    layers = [load.sealed(layer, blocks) * load.sequences * block for layer in load.tiered]
    filled = load.sequences * block
    room = max(load.device_bytes // block * block - len(layers) * filled, 0)
    rate = rates.up * machine.link_left(number)
    per_byte_up = 1 / rate + (rates.copy_overhead / max(layers) if any(layers) else 0.0)

    # What the device reads of each layer grows, from nothing to where both attend for as long; first in those layers in
    # which the host spends most on a byte. What there is room for passes no link.
    device = load.layers * load.linear
    read, found = 0.0, list[tuple[float, float]]()
    shares = sorted((1 / rates.host + rates.host_overhead / nbytes if nbytes else 0.0, nbytes) for nbytes in layers)
    for per_byte, nbytes in shares:
        device += max(nbytes * per_byte, filled / rates.device)
    for per_byte, nbytes in reversed(shares):
        more = max((nbytes * per_byte - filled / rates.device) / (per_byte + 1 / rates.device), 0.0)
        if read <= room < read + more:
            found.append((device - (room - read) * per_byte, 0.0))
        read, device = read + more, device - more * per_byte
        if read >= room:
            found.append((device, (read - room) * per_byte_up))
    return found or [(device, 0.0)]
