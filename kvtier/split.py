"""Split attention: each block is attended where it lies, and the parts are merged by log-sum-exp (Neo, section 3).

What lies in host memory is read there by CPU threads, through block tables; what lies on the device is read by the
device, at the same time. On a CPU model without a device tier there is one part, and it is the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvtier.cpu import fallback, native
from kvtier.kernels import reference
from kvtier.kernels.terms import Terms
from kvtier.storage.gather import joined
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import TensorCopy
from kvtier.types import Direction

#: Queries per sequence up to which host threads serve. With more, arithmetic counts and not memory: a dense read pays.
MOST_QUERIES = 16

Slots = list[list[tuple[int, int]]]  # for each row: (block index, slot), rising


class HostPlan:
    """Where host threads find a layer's blocks. Valid while `key` is.

    Attributes:
        key: what it was made for.
        near, far: the blocks in either pool.
        blocks: of the part that the host attends to, as addresses; None without the native library.
        device: the same for the device's part, where the device is emulated in RAM.
        distinct: blocks that host threads read in one call.
    """

    __slots__ = ("blocks", "device", "distinct", "far", "key", "near")

    def __init__(self, key: tuple[int, int], near: Slots, far: Slots) -> None:
        self.key = key
        self.near = near
        self.far = far
        self.blocks: native.BlockList | None = None
        self.device: native.BlockList | None = None
        self.distinct = 0


#: Caches whose calls may have threads of the library's own at work or asleep.
_employers: weakref.WeakSet[Tiers] = weakref.WeakSet()


def dismiss(tiers: Tiers) -> None:
    """Told that `tiers` is given up: with the last of them, the library's threads end."""
    if tiers in _employers:
        _employers.discard(tiers)
        if not _employers:
            native.library().kvtier_shutdown()


def able(layer: LayerStore) -> bool:
    """Whether host threads serve this layer's decoding, whatever is asked, so that it needs no workspace for it."""
    layout = layer.layout
    graph = torch.is_grad_enabled() and layer.carries_graph
    return not graph and layout.dtype in native.DTYPES and layout.k_heads == layout.v_heads and native.available()


def serves(layer: LayerStore, query: torch.Tensor, terms: Terms) -> bool:
    """Whether `attend` can take this call. What it cannot take is read as one tensor."""
    layout = layer.layout
    heads, queries = query.shape[1], query.shape[2]
    if (
        queries > MOST_QUERIES
        or query.dtype is not layout.dtype
        or layout.dtype not in native.DTYPES
        or layout.k_heads != layout.v_heads
        or heads % layout.k_heads
        or (torch.is_grad_enabled() and (query.requires_grad or layer.carries_graph))
    ):
        return False
    mask = terms.mask
    if mask is not None and (mask.dtype not in native.MASKS or mask.requires_grad):
        return False
    if layer.tiers.device.type != "cpu" and not layer.missing():
        # All on the device, where torch's own kernel is the best there is, if one tensor of the layer fits as well.
        tiers = layer.tiers
        if layer.workspace_bytes(layer.length) <= tiers.near.budget.free + tiers.workspace.nbytes:
            return False
    return native.available() or fallback.serves(queries, layout.k_dim, layout.v_dim, terms)


def attend(layer: LayerStore, length: int, query: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Attention of `query` over the first `length` tokens of a layer, where they lie.

    Args:
        layer: whose KV.
        length: tokens.
        query: `[batch, heads, queries, k_dim]`, on the layer's device.
        terms: scale, masks and biases, of which `serves` approved.

    Returns:
        `[batch, heads, queries, v_dim]` in the query's dtype.
    """
    plan = _plan(layer, length)
    workspace = layer.tiers.workspace
    if workspace.nbytes and not any(x.dense for x in layer.tiers.layers):
        workspace.release()  # left over from a long prefill
    counters = layer.tiers.counters
    if layer.tiers.far is None:
        counters.host_attended += 1
        counters.host_blocks += plan.distinct
        if plan.blocks is not None:
            return _native(layer, length, query, terms, plan.blocks)
        return fallback.attend(query, _runs(layer, layer.pool, plan.near, length), terms)[0].to(query.dtype)
    if not any(plan.far):
        counters.block_hits += len(layer.resident)
        return _on_device(layer, length, query, terms, plan)[0].to(query.dtype)
    counters.host_attended += 1
    counters.host_blocks += plan.distinct
    counters.block_hits += len(layer.resident)
    return _both(layer, length, query, terms, plan)


def _both(layer: LayerStore, length: int, query: torch.Tensor, terms: Terms, plan: HostPlan) -> torch.Tensor:
    """Device and host at once: the query goes down, both attend, the host's part comes up, the two are merged."""
    engine, host = layer.tiers.engine, torch.device("cpu")
    pinned = layer.tiers.device.type == "cuda"
    batch, heads, queries, _ = query.shape
    below = torch.empty(query.shape, dtype=query.dtype, device=host, pin_memory=pinned)
    down = engine.submit([TensorCopy(query, below)], Direction.QUERY)
    others = _terms_on(terms, host)
    # Sinks belong to the whole, and are counted in one part only.
    own = replace(terms, sinks=None)
    part = None
    if layer.tiers.device.type != "cpu":
        part = _on_device(layer, length, query, own, plan)  # launched before the CPU waits for the query
    out = torch.empty((batch, heads, queries, layer.layout.v_dim), dtype=torch.float32, device=host, pin_memory=pinned)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=host, pin_memory=pinned)
    down.synchronize()
    if plan.blocks is not None:
        _set_length(plan.blocks, length)
        _employers.add(layer.tiers)
        future = native.submit(
            _shape(layer), below, plan.blocks, others, threads=torch.get_num_threads(), out=out, lse=lse
        )
        try:
            if part is None:
                part = _on_device(layer, length, query, own, plan)
        finally:
            # Whatever happens, nobody gives memory back while threads still read it.
            future.wait()
    else:
        pool = layer.tiers.far_pools[layer.layout]
        result = fallback.attend(below, _runs(layer, pool, plan.far, length), others)
        out.copy_(result[0])
        lse.copy_(result[1])
        part = part or _on_device(layer, length, query, own, plan)
    up = [torch.empty_like(x, device=query.device) for x in (out, lse)]
    back = engine.submit([TensorCopy(out, up[0]), TensorCopy(lse, up[1])], Direction.RESULT)
    back.wait()
    if pinned:
        # Pinned memory is given back to torch's allocator when these names go: only after the copy has read it.
        back.synchronize()
    return reference.merge([part, (up[0], up[1])])[0].to(query.dtype)


def _on_device(
    layer: LayerStore, length: int, query: torch.Tensor, terms: Terms, plan: HostPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's part: (out in fp32, lse)."""
    batch, heads, queries, _ = query.shape
    if plan.device is not None:
        lse = torch.empty((batch, heads, queries), dtype=torch.float32)
        out = torch.empty((batch, heads, queries, layer.layout.v_dim), dtype=torch.float32)
        return _native(layer, length, query, terms, plan.device, out, lse), lse
    return _gathered(layer, length, query, terms, plan)


def _gathered(
    layer: LayerStore, length: int, query: torch.Tensor, terms: Terms, plan: HostPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's part in plain torch: row by row, for each has blocks of its own."""
    outs, lses = [], []
    for row, slots in enumerate(plan.near):
        keys, values, positions = _tokens(layer, slots, length)
        out, lse = reference.attend(
            query[row : row + 1].float(), keys, values, _of_row(terms, row), length=length, positions=positions
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses).float()


def _tokens(
    layer: LayerStore, slots: Sequence[tuple[int, int]], length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys `[1, heads, tokens, k_dim]`, values and positions `[tokens]` of some near blocks of one row."""
    layout, pool, size = layer.layout, layer.pool, layer.layout.block_size
    keys = [torch.empty((layout.k_heads, 0, layout.k_dim), dtype=layout.dtype, device=layer.tiers.device)]
    values = [torch.empty((layout.v_heads, 0, layout.v_dim), dtype=layout.dtype, device=layer.tiers.device)]
    positions = [torch.empty(0, dtype=torch.int64)]
    for _, index, slot, count in joined((0, index, slot) for index, slot in slots):
        start = index * size
        n = min(count * size, length - start)
        keys.append(pool.keys(slot, count).transpose(0, 1).flatten(1, 2)[:, :n])
        values.append(pool.values(slot, count).transpose(0, 1).flatten(1, 2)[:, :n])
        positions.append(torch.arange(start, start + n))
    at = torch.cat(positions).to(layer.tiers.device)
    return torch.cat(keys, 1)[None], torch.cat(values, 1)[None], at


def _of_row(terms: Terms, row: int) -> Terms:
    mask, firsts = terms.mask, terms.firsts
    return replace(
        terms,
        mask=mask if mask is None or mask.shape[0] == 1 else mask[row : row + 1],
        firsts=None if firsts is None else firsts[row : row + 1],
    )


def _terms_on(terms: Terms, device: torch.device) -> Terms:
    moved = {
        name: getattr(terms, name).to(device)
        for name in ("mask", "firsts", "sinks", "slopes")
        if getattr(terms, name) is not None
    }
    return replace(terms, **moved) if moved else terms


# Plans


def _plan(layer: LayerStore, length: int) -> HostPlan:
    count = -(-length // layer.layout.block_size)
    key = (layer.version, count)
    plan = layer.host_plan
    if isinstance(plan, HostPlan) and plan.key == key:
        return plan
    near: Slots = []
    far: Slots = []
    for table in layer.rows:
        near.append([(i, b.near) for i, b in enumerate(table.blocks[:count]) if b.near is not None])
        far.append([(i, b.far) for i, b in enumerate(table.blocks[:count]) if b.near is None and b.far is not None])
    plan = layer.host_plan = HostPlan(key, near, far)
    hosts = near if layer.tiers.far is None else far
    plan.distinct = len({slot for row in hosts for _, slot in row})
    if native.available():
        if layer.tiers.far is None:
            plan.blocks = _block_list(layer.pool, near, whole=True)
        else:
            if any(far):
                plan.blocks = _block_list(layer.tiers.far_pools[layer.layout], far)
            if layer.tiers.device.type == "cpu":
                plan.device = _block_list(layer.pool, near)
    return plan


def _block_list(pool: BlockPool, slots: Slots, *, whole: bool = False) -> native.BlockList:
    addresses = [[pool.address(slot) for _, slot in row] for row in slots]
    return native.BlockList(addresses, None if whole else [[index for index, _ in row] for row in slots])


def _shape(layer: LayerStore) -> native.Shape:
    layout = layer.layout
    return native.Shape(layout.dtype, layout.k_heads, layout.k_dim, layout.v_dim, layout.block_size)


def _set_length(blocks: native.BlockList, length: int) -> None:
    if blocks.length != length:
        blocks.lengths.fill_(length)
        blocks.length = length


def _native(
    layer: LayerStore,
    length: int,
    query: torch.Tensor,
    terms: Terms,
    blocks: native.BlockList,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    _set_length(blocks, length)
    _employers.add(layer.tiers)  # without an OpenMP team to borrow, this too is work for the library's threads
    return native.attend(_shape(layer), query, blocks, terms, threads=torch.get_num_threads(), out=out, lse=lse)


def _runs(layer: LayerStore, pool: BlockPool, slots: Slots, length: int) -> list[list[fallback.Run]]:
    """For each row, neighbouring whole blocks joined; the last block by itself if it is not full."""
    size = layer.layout.block_size
    rows = []
    for row in slots:
        runs: list[fallback.Run] = []
        for index, slot in row:
            n = min(size, length - index * size)
            last = runs[-1] if runs else None
            if last is not None and n == size and last.tokens == size and slot == last.slot + last.count:
                last.count += 1
            else:
                runs.append(fallback.Run(slot, n))
        for run in runs:
            run.keys = pool.keys(run.slot, run.count)[:, :, : run.tokens]
            run.values = pool.values(run.slot, run.count)[:, :, : run.tokens]
        rows.append(runs)
    return rows
