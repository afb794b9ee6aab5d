"""What a user can see: counters of one cache, and the snapshot `cache.stats`. No torch here."""

from __future__ import annotations

import enum
import html
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvtier.config import format_size


class Tier(enum.StrEnum):
    """Where the bytes of a block are."""

    DEVICE = "device"
    HOST = "host"


class Printed:
    """A notebook shows it as `print` does, and not all that is in it over several screens."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython."""
        printer.text(str(self))


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


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table that `print(cache.stats)` gives.

    Attributes:
        name: of the counter.
        value: for a reader, with its unit.
        meaning: what is counted.
        mark: "+" the more the better, "-" takes time or memory, "!" should be 0, "" neither.
    """

    name: str
    value: str
    meaning: str
    mark: str = ""


#: What is shown of each counter: unit, meaning, mark.
_SHOWN = {
    "steps": ("", "forwards", ""),
    "views_attended": ("calls", "attention over what the cache holds, without a dense tensor of it", "+"),
    "host_attended": ("calls", "of these, served by host threads, wholly or in part", ""),
    "host_blocks": ("blocks", "read in place by host threads", ""),
    "host_bytes": ("bytes", "of these blocks", ""),
    "host_seconds": ("s", "in which host threads attended", "-"),
    "attention_bytes": ("bytes", "queries and results, copied for attention on the host", "-"),
    "io_buffer_misses": ("calls", "had no room in host_budget for their buffer: a larger one is faster", "!"),
    "dense_reads": ("layers", "returned as tensors by design: the model's attention reads no views", "-"),
    "dense_read_bytes": ("bytes", "of these tensors", "-"),
    "dense_fallbacks": ("views", "made dense by an operation that views do not know", "!"),
    "dense_fallback_bytes": ("bytes", "of these tensors", "!"),
    "dense_fallback_ops": ("", "the operations", "!"),
    "bytes_down": ("bytes", "of blocks, copied from the device to the host, once each", ""),
    "bytes_up": ("bytes", "of blocks, fetched from the host to the device", "-"),
    "copies_down": ("copies", "that this took", ""),
    "copies_up": ("copies", "that this took", ""),
    "seconds_down": ("s", "in which these copies ran", ""),
    "seconds_up": ("s", "in which these copies ran", ""),
    "block_hits": ("blocks", "read where they were, without a copy", "+"),
    "block_fetches": ("blocks", "fetched", "-"),
    "prefetched": ("blocks", "of these, ahead of the layer that reads them", "+"),
    "evictions": ("blocks", "left the device", ""),
    "promotions": ("blocks", "fetched and kept on the device", "+"),
    "moved_blocks": ("blocks", "moved within a tier, to bring free room together", "-"),
    "failed_transfers": ("copies", "failed; their sources are intact", "!"),
    "stall_seconds": ("s", "in which attention, or room for tokens, waited for copies", "-"),
    "audited_blocks": ("blocks", "compared with what was written", ""),
    "corrupt_blocks": ("blocks", "of these held other bytes", "!"),
}
_MARKS = "+ the more the better   - takes time or memory   ! should be 0"
_TIERS = ("in use", "budget", "peak", "blocks", "free blocks")
#: Characters of a column of tiers.
_COLUMN = 13


@dataclass(slots=True)
class CacheStats(Printed, Counters):
    """A snapshot of a cache, `cache.stats`, or of a memory, `memory.stats`.

    Prints as a line that sums up, a table of the tiers, and one of the counters that are not 0, with what each means;
    in notebooks as HTML.

    Attributes:
        device: the device tier of the memory that the cache uses.
        host: its host tier.
        resident_bytes: bytes in layers that stay in Transformers' own layer classes (sliding windows, linear
            attention, indexers); outside the budgets.
        native_missing: why attention on the host runs on torch, several times slower than by the native kernel, and
            what to do about it; "" where it does not, and where `KVTIER_CPU=none` asks for that.
    """

    device: TierStats = NO_TIER
    host: TierStats = NO_TIER
    resident_bytes: int = 0
    native_missing: str = ""

    def tiers(self) -> list[str]:
        """What is in use of each tier, in words."""
        each = (("device", self.device), ("host", self.host))
        return [f"{name} {format_size(tier.bytes)} of {format_size(tier.budget)}" for name, tier in each if tier.budget]

    def summary(self) -> str:
        """Where attention ran, what moved, what it cost, and what looks wrong, in a line."""
        return f"{_count(self.steps, 'forward')}: {self._where()}; {self._moved()}; {self._cost()}; {self._wrong()}."

    def _where(self) -> str:
        calls, host = self.views_attended, self.host_attended
        if not calls:
            if self.dense_reads or self.dense_fallbacks:
                return "all attention by the model's own code, over dense tensors"
            where = " in tiered layers" if self.resident_bytes else ""
            return f"no attention over a past{where} yet" if self.steps else "nothing attended to yet"
        if not host:
            return (
                "all attention on the device"
                if self.device.budget
                else "all attention by torch, over a layer laid out in full"
            )
        if not self.device.budget:
            return "all attention on the host" if host == calls else f"{host / calls:.0%} of attention on the host"
        # A call of which host threads served any part counts as theirs too: blocks say how large it was.
        part = "every attention call" if host == calls else f"{host / calls:.0%} of attention calls"
        text, read = f"host threads took part in {part}", self.host_blocks + self.block_hits + self.block_fetches
        return f"{text} and read {self.host_blocks / read:.0%} of the blocks, the device the rest" if read else text

    def _moved(self) -> str:
        if not (self.bytes_up or self.bytes_down):
            return "no block moved"
        both = ((self.bytes_up, "fetched"), (self.bytes_down, "copied to the host"))
        return ", ".join(f"{format_size(size)} {where}" for size, where in both if size)

    def _cost(self) -> str:
        parts = [f"waited {_seconds(self.stall_seconds)} for copies"] if self.stall_seconds else ["no wait for copies"]
        if self.host_seconds:
            parts.append(f"host threads attended for {_seconds(self.host_seconds)}")
        return ", ".join(parts)

    def _wrong(self) -> str:
        found = []
        if self.native_missing and self.views_attended and (self.host_attended or not self.device.budget):
            found.append(f"no native kernel ({self.native_missing.rstrip('.')})")
        if self.dense_fallbacks:
            ops = ", ".join(sorted(self.dense_fallback_ops)[:3])
            found.append(f"{_count(self.dense_fallbacks, 'dense fallback')} ({ops}; see kvtier.enable)")
        if self.io_buffer_misses:
            found.append(f"{_count(self.io_buffer_misses, 'call')} without room for a buffer (host_budget is small)")
        if self.failed_transfers:
            found.append(_count(self.failed_transfers, "failed copy").replace("copys", "copies"))
        if self.corrupt_blocks:
            found.append(_count(self.corrupt_blocks, "corrupt block"))
        late = self.block_fetches - self.prefetched
        if self.stall_seconds and late > self.block_fetches // 2:
            found.append(f"{late} of {_count(self.block_fetches, 'fetch').replace('fetchs', 'fetches')} were late")
        return f"look at: {', '.join(found)}" if found else "nothing looks wrong"

    def lines(self) -> list[Line]:
        """The counters that are not 0, for a reader; `steps` in any case."""
        found = []
        for name, (unit, meaning, mark) in _SHOWN.items():
            value = getattr(self, name)
            if value or name == "steps":
                found.append(Line(name, _value(value, unit), meaning, mark))
        if self.resident_bytes:
            meaning = "in layers that are not tiered, outside the budgets"
            found.append(Line("resident_bytes", format_size(self.resident_bytes), meaning))
        return found

    def _tiers(self) -> list[tuple[str, ...]]:
        return [
            (
                name,
                *(format_size(size) for size in (x.bytes, x.budget, x.peak_bytes)),
                f"{x.used_blocks:,}",
                f"{x.free_blocks:,}",
            )
            for name, x in (("device", self.device), ("host", self.host))
            if x.budget
        ]

    def __str__(self) -> str:
        text = [self.summary()]
        tiers = self._tiers()
        if tiers:
            rows = [("tier", *_TIERS), *tiers]
            text += ["", *(f"  {row[0]:<8}{''.join(f'{x:>{_COLUMN}}' for x in row[1:])}" for row in rows)]
        lines = self.lines()
        width = max([len(line.value) for line in lines])
        text += ["", *(f"{x.mark or ' '} {x.name:<22}{x.value:>{width}}  {x.meaning}" for x in lines)]
        if any(x.mark for x in lines):
            text += ["", _MARKS]
        return "\n".join(text)

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        tiers = self._tiers()
        parts = [f"<p>{html.escape(self.summary())}</p>"]
        if tiers:
            rows = [_row("th", "tier", *_TIERS), *(_row("td", *x) for x in tiers)]
            parts.append(f"<table>{''.join(rows)}</table>")
        rows = [_row("th", "", "value", "counter", "meaning")]
        rows += [_row("td", x.mark, x.value, x.name, x.meaning) for x in self.lines()]
        parts.append(f"<table>{''.join(rows)}</table><p>{html.escape(_MARKS)}</p>")
        return f"<div>{''.join(parts)}</div>"


def _row(tag: str, *cells: str) -> str:
    """Numbers are right of their column, words left."""
    return f"<tr>{''.join(_cell(tag, x) for x in cells)}</tr>"


def _cell(tag: str, text: str) -> str:
    align = "right" if text[:1].isdigit() else "left"
    return f'<{tag} style="text-align:{align};padding:0 .6em">{html.escape(text)}</{tag}>'


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    """Seconds for a reader, three digits: `"12.3 s"`, `"4.56 ms"`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _value(value: Any, unit: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} x {name}" for name, count in sorted(value.items()))
    if unit == "bytes":
        return format_size(value)
    if unit == "s":
        return _seconds(value)
    return f"{value:,} {unit.removesuffix('s') if value == 1 else unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long forward is, for a hook: `TieredKVCache(progress=...)`.

    Attributes:
        tokens: new tokens of each row in this forward.
        past: tokens before it.
        layer: tiered layers that have these tokens, from 1 on. A device may still be computing them.
        layers: of all; 0 where nobody knows yet, in the first forward of a cache without a config.
        seconds: since its first layer.
    """

    tokens: int
    past: int
    layer: int
    layers: int
    seconds: float


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
        both_blocks: blocks with a slot on the device and a copy on the host, counted in `device_blocks` and in
            `host_blocks`.
        grows: whether it is not tiered and keeps something of every token, so that `bytes` grow with the context.
    """

    layer: int
    kind: str
    tokens: int
    device_blocks: int
    host_blocks: int
    shared_blocks: int
    bytes: int
    both_blocks: int = 0
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Residency(Printed):
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
