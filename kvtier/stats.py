"""What a user can see: counters of one cache, and the snapshot `cache.stats`. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace

from kvtier.config import format_size


class Tier(enum.StrEnum):
    """Where the bytes of a block are."""

    DEVICE = "device"
    HOST = "host"


@dataclass(slots=True)
class Counters:
    """Running totals of one cache since it was made or reset.

    Attributes:
        steps: forwards seen.
        views_attended: attention calls served without making the cache's tensor dense for the model.
        host_attended: of those, calls that host threads served, wholly or together with the device.
        host_blocks, host_bytes: blocks that host threads read in place, in total.
        host_seconds: seconds in which host threads attended.
        attention_bytes: bytes of queries and results copied between device and host for it.
        io_buffer_misses: calls for which `host_budget` had no room for the pinned I/O buffer, so that they took memory
            of their own: slower, and as an activation.
        dense_reads: layers' KV returned to the model as dense tensors by design, not counted as fallbacks: to models
            that expand latents themselves (multi-head latent attention), and to attention implementations that cannot
            read views (flex_attention, flash attention).
        dense_read_bytes: bytes of those tensors, in total.
        dense_fallbacks: views that another operation forced into a dense tensor of the model's own.
        dense_fallback_bytes: bytes of those tensors, in total.
        dense_fallback_ops: which operations, how often.
        bytes_down: bytes copied device -> host.
        bytes_up: bytes copied host -> device.
        copies_down: copies device -> host after neighbouring blocks were joined.
        copies_up: copies host -> device after neighbouring blocks were joined.
        seconds_down: seconds in which blocks were copied device -> host.
        seconds_up: seconds in which blocks were copied host -> device.
        block_hits: blocks read on the device without a transfer.
        block_fetches: blocks that were fetched.
        prefetched: of those, blocks whose fetch was submitted before the layer was attended to.
        evictions: blocks that gave up their device slot.
        promotions: fetched blocks that stayed on the device after their use.
        moved_blocks: blocks moved within a tier, to defragment it.
        failed_transfers: transfers that failed.
        stall_seconds: seconds in which attention, or room for new tokens, waited for a copy of blocks.
        audited_blocks: blocks in host memory that were compared with the checksum of what was written.
        corrupt_blocks: of those, blocks that held other bytes.
    """

    steps: int = 0
    views_attended: int = 0
    host_attended: int = 0
    host_blocks: int = 0
    host_bytes: int = 0
    host_seconds: float = 0.0
    attention_bytes: int = 0
    io_buffer_misses: int = 0
    dense_reads: int = 0
    dense_read_bytes: int = 0
    dense_fallbacks: int = 0
    dense_fallback_bytes: int = 0
    dense_fallback_ops: dict[str, int] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    copies_down: int = 0
    copies_up: int = 0
    seconds_down: float = 0.0
    seconds_up: float = 0.0
    block_hits: int = 0
    block_fetches: int = 0
    prefetched: int = 0
    evictions: int = 0
    promotions: int = 0
    moved_blocks: int = 0
    failed_transfers: int = 0
    stall_seconds: float = 0.0
    audited_blocks: int = 0
    corrupt_blocks: int = 0

    def count_dense(self, operation: str | None, nbytes: int) -> None:
        """A layer's KV became tensors of the model's own: forced by `operation`, or, for None, by design."""
        if operation is None:
            self.dense_reads += 1
            self.dense_read_bytes += nbytes
        else:
            self.dense_fallbacks += 1
            self.dense_fallback_bytes += nbytes
            self.dense_fallback_ops[operation] = self.dense_fallback_ops.get(operation, 0) + 1

    def add(self, other: Counters) -> None:
        """Add the totals of another cache."""
        for each in fields(Counters):
            value = getattr(other, each.name)
            if isinstance(value, dict):
                mine = getattr(self, each.name)
                for name, count in list(value.items()):
                    mine[name] = mine.get(name, 0) + count
            else:
                setattr(self, each.name, getattr(self, each.name) + value)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of a memory, all devices together.

    Attributes:
        budget: bytes it may use (0: there is no such tier); less than given once the device was full.
        bytes: bytes allocated now: slabs of blocks, workspaces and pinned I/O buffers, and what torch's allocator takes
            from a CUDA device with each of them, less than 2 MiB, because it takes whole segments.
        peak_bytes: the most that was taken of the budget, without whole segments; kept after the memory is closed.
        workspace_bytes: the part of `bytes` in which one layer's KV is laid out for torch's attention.
        io_buffer_bytes: the part of `bytes` through which queries, masks and results of attention on the host pass.
        page_locked_bytes: the part of `bytes` that is page-locked, so that an accelerator copies it in the background.
        used_blocks: slots in use.
        free_blocks: slots allocated and free.
    """

    budget: int
    bytes: int
    peak_bytes: int
    workspace_bytes: int
    io_buffer_bytes: int
    page_locked_bytes: int
    used_blocks: int
    free_blocks: int

    def with_peak(self, peak_bytes: int) -> TierStats:
        """The same, with a peak of at least this."""
        return self if peak_bytes <= self.peak_bytes else replace(self, peak_bytes=peak_bytes)

    def empty(self) -> TierStats:
        """The same tier when nothing is in it any more."""
        return TierStats(self.budget, 0, self.peak_bytes, 0, 0, 0, 0, 0)


NO_TIER = TierStats(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class CacheStats(Counters):
    """A snapshot of a cache, `cache.stats`, or of a memory, `memory.stats`. Prints what is not 0, a line each.

    Attributes:
        device: the device tier of the memory that the cache uses.
        host: its host tier.
        resident_bytes: bytes in layers that stay in Transformers' own layer classes (sliding windows, linear
            attention, indexers); outside the budgets.
    """

    device: TierStats = NO_TIER
    host: TierStats = NO_TIER
    resident_bytes: int = 0

    def __str__(self) -> str:
        lines = [
            f"{name:<22}{format_size(x.bytes)} of {format_size(x.budget)}, {format_size(x.peak_bytes)} at the most; "
            f"blocks: {x.used_blocks} in use, {x.free_blocks} free"
            for name, x in (("device", self.device), ("host", self.host))
            if x.budget
        ]
        for each in fields(Counters):
            value = getattr(self, each.name)
            if value or each.name == "steps":
                size = f" ({format_size(value)})" if "bytes" in each.name and value >= 1024 else ""
                lines.append(f"{each.name:<22}{round(value, 4) if isinstance(value, float) else value}{size}")
        if self.resident_bytes:
            lines.append(f"{'resident_bytes':<22}{self.resident_bytes} ({format_size(self.resident_bytes)})")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class LayerResidency:
    """Where the KV of one layer is at one moment.

    Attributes:
        layer: index of the layer in the model.
        kind: `"tiered"`, or the name of the Transformers layer class that holds it.
        tokens: tokens of the longest row.
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
    """What is where, a layer a line. Printing it gives a table."""

    layers: tuple[LayerResidency, ...]

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'kind':<26}{'tokens':>8}{'device':>8}{'host':>8}{'shared':>8}{'MiB':>10}"]
        lines += [
            f"{x.layer:>5}  {x.kind:<26}{x.tokens:>8}{x.device_blocks:>8}{x.host_blocks:>8}"
            f"{x.shared_blocks:>8}{x.bytes / 2**20:>10.2f}"
            for x in self.layers
        ]
        return "\n".join(lines)
