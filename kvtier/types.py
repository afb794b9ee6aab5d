"""The words that every part shares. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.StrEnum):
    """Where the bytes of a block lie."""

    DEVICE = "device"
    HOST = "host"


class Direction(enum.StrEnum):
    """What a transfer is for. Fetches go before write-backs (Pensieve, section 5.1), and what attention on the host
    waits for before both."""

    FETCH = "fetch"  # blocks, host -> device
    WRITE_BACK = "write_back"  # blocks, device -> host
    QUERY = "query"  # what attention on the host reads, device -> host
    RESULT = "result"  # what it wrote, host -> device


@dataclass(frozen=True, slots=True)
class LayerResidency:
    """How the KV of one layer lies at one moment.

    Attributes:
        layer: index of the layer in the model.
        kind: `"tiered"`, or the name of the Transformers layer class that holds it resident.
        tokens: tokens per row.
        device_blocks: blocks with a slot on the device.
        host_blocks: blocks with a slot on the host (a block may have both).
        shared_blocks: blocks held by more than one block table.
        bytes: bytes of the distinct blocks, slack of the last block included.
    """

    layer: int
    kind: str
    tokens: int
    device_blocks: int
    host_blocks: int
    shared_blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """What lies where, a layer a line. Printing it gives a table."""

    layers: tuple[LayerResidency, ...]

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'kind':<26}{'tokens':>8}{'device':>8}{'host':>8}{'shared':>8}{'MiB':>10}"]
        lines += [
            f"{x.layer:>5}  {x.kind:<26}{x.tokens:>8}{x.device_blocks:>8}{x.host_blocks:>8}"
            f"{x.shared_blocks:>8}{x.bytes / 2**20:>10.2f}"
            for x in self.layers
        ]
        return "\n".join(lines)
