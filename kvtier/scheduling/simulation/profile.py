"""What the steps of a simulated engine take."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.planning.hardware.machines import COPY, OF_DEVICE_MEMORY, OF_FLOPS, OF_LINK, Machine, ModelSize
from kvtier.scheduling.prices import Prices


@dataclass(frozen=True, slots=True)
class Profile:
    """What an engine's steps take.

    Attributes:
        machine, model: sizes and rates.
        device_blocks, host_blocks: for KV, of all layers.
        block_size: tokens.
        overhead: seconds of a step besides the device's work.
        write_through: whether blocks are copied to the host when they are full, as far as the host has room.
    """

    machine: Machine
    model: ModelSize
    device_blocks: int
    host_blocks: int = 0
    block_size: int = 16
    overhead: float = 0.0
    write_through: bool = False

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers."""
        return self.model.layers * self.model.kv_bytes

    @property
    def token_copy(self) -> float:
        """Seconds of one token's KV over the link."""
        return self.kv_bytes / (self.machine.link * OF_LINK)

    def linear(self, tokens: int) -> float:
        """Seconds of all that a step does but attention over the past: weights are read, or arithmetic is done."""
        return self.model.layers * self.model.linear_seconds(self.machine, tokens) if tokens else 0.0

    def attention(self, tokens: int, past: int) -> float:
        """Seconds of one sequence's attention on the device: the past is read, or the arithmetic is done."""
        model = self.model
        read = past * self.kv_bytes / (self.machine.device_memory * OF_DEVICE_MEMORY)
        pairs = tokens * (past + (tokens + 1) / 2)
        return max(read, 4 * model.layers * model.heads * model.head_dim * pairs / (self.machine.flops * OF_FLOPS))

    def prices(self, max_tokens: int) -> Prices:
        """What `Scheduler` decides on."""
        model, flops = self.model, self.machine.flops * OF_FLOPS
        return Prices(
            fixed=self.linear(1) + self.overhead,
            per_token=2 * model.active / flops,
            per_pair=4 * model.layers * model.heads * model.head_dim / flops,
            up=self.token_copy,
            down=self.token_copy,
            copy=COPY,
            overlaps=self.machine.overlaps,
            chunked=max_tokens,
            written_through=self.write_through,
        )
