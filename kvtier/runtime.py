"""The conductor of one cache: memories by device, layers, the steps of a forward, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier import integrity
from kvtier.attention import calls, split, streamed
from kvtier.config import (
    DEVICE_BLOCK,
    DEVICE_RESERVE,
    DEVICE_RESERVE_SHARE,
    HOST_BLOCK,
    HOST_RESERVE,
    HOST_RESERVE_SHARE,
    CacheOptions,
    resolve_size,
)
from kvtier.errors import BudgetError, ClosedError, StaleViewError
from kvtier.kernels.params import AttentionParams
from kvtier.metrics import CacheStats, Counters, TierStats
from kvtier.planning import admission
from kvtier.steps import Steps
from kvtier.storage import gather
from kvtier.storage.block import BlockLayout, Group, in_one_dtype, likely_groups
from kvtier.storage.memory import Budget, Memory, free_device_memory, free_host_memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import CudaTransfers, InlineTransfers, TransferEngine
from kvtier.types import LayerResidency

EngineFactory = Callable[[torch.device, Counters], TransferEngine]


def default_engine(device: torch.device, counters: Counters) -> TransferEngine:
    """CUDA streams on a CUDA device; inline copies elsewhere."""
    if device.type == "cuda":
        return CudaTransfers(device, counters)
    return InlineTransfers(counters)


class Runtime:
    """Everything behind a `TieredKVCache`.

    Args:
        options: checked options.
        expected: the layers that a forward updates, where that is known in advance.
        tiered: how many tiered layers there will be, where that is known in advance.
        engine: makes the transfer engine of a device (tests pass one that holds or fails transfers).
        poison: fill memory that nobody owns with NaN (tests).
        dense: whether attention is expected to ask for one layer's KV as one tensor.
    """

    def __init__(
        self,
        options: CacheOptions,
        *,
        expected: frozenset[int] | None = None,
        tiered: int = 0,
        engine: EngineFactory = default_engine,
        poison: bool = False,
        dense: bool = True,
    ) -> None:
        self.options = options
        self.counters = Counters()
        self.steps = Steps(expected, lambda: {x.length for x in self.layers.values() if x.length})
        self.layers: dict[int, LayerStore] = {}
        self.closed = False
        self._tiered = tiered
        self._engine = engine
        self._poison = poison
        self._dense = dense
        self._host: Memory | None = None
        self._host_pools: dict[BlockLayout, BlockPool] = {}
        self._tiers: dict[torch.device, Tiers] = {}
        self._following: dict[LayerStore, LayerStore] = {}

    # Updates

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStore:
        """Add keys `[batch, heads, tokens, k_dim]` and values `[batch, heads, tokens, v_dim]` to a layer.

        Raises:
            MismatchError, BudgetError, TransferError: the layer is as it was before.
        """
        store = self.layers.get(index)
        graph = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if keys.dtype is not values.dtype:
            keys, values = in_one_dtype(keys, values)
        if store is None:
            store = self._new_layer(index, keys, values)
        store.carries_graph |= graph
        if store.is_token(keys, values) and store.append_token(keys, values):
            return store
        store.check(keys, values)
        if keys.shape[2]:
            store.tiers.engine.poll()
            groups = store.group(keys, values)
            self._admit(store, groups, keys.shape[2])
            store.append(keys, values, groups)
        return store

    def replace(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Let a layer hold these tokens and nothing else. On an error it holds what it held."""
        old = self.layers.get(index)
        saved = gather.own_kv(old, old.length) if old is not None and old.length else None
        self._remove(index)
        try:
            self.append(index, keys, values)
        except Exception:
            self._remove(index)
            if saved is not None:
                self.append(index, *saved)
            raise

    def _remove(self, index: int) -> None:
        store = self.layers.pop(index, None)
        if store is not None:
            store.clear()
            store.tiers.layers.remove(store)
            self._following.clear()

    def undo_first(self) -> None:
        """After a refusal: take back what it was the first forward of, where nobody knows yet which layers there are,
        so that `crop(0)` could not tell it from one that is finished."""
        if self.steps.expected is None and not any(self.steps.began.values()):
            # The layer that refused began nothing, but it may have a store by now.
            for index in [i for i, x in self.layers.items() if i in self.steps.began or not x.length]:
                self._remove(index)
            self.steps.began = {}

    def early(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make the store of a layer from tensors that may have no tokens."""
        if index not in self.layers:
            self._new_layer(index, *in_one_dtype(keys, values))

    def _new_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStore:
        tiers = self._tiers_for(keys.device)
        size = self.options.block_size or (HOST_BLOCK if tiers.far is None else DEVICE_BLOCK)
        store = LayerStore(index, BlockLayout.of(keys, values, size), tiers)
        store.dense = self._dense and not self.options.host_attention
        try:
            store.check(keys, values)
        except Exception:
            store.tiers.layers.remove(store)
            raise
        self.layers[index] = store
        self._following.clear()
        return store

    def admit(self, tokens: int) -> None:
        """Refuse a step that will not fit, for a step whose first layer is not tiered. Raises `BudgetError`."""
        for tiers in self._tiers.values():
            if tiers.layers:
                store = tiers.layers[0]
                self._admit(store, likely_groups(store.rows, tokens), tokens)

    def _admit(self, store: LayerStore, groups: Sequence[Group], tokens: int) -> None:
        """Refuse, before anything changes, a step that will not fit: this layer stands for those still to come."""
        tiers = store.tiers
        done = [x for x in tiers.layers if x.index in self.steps.began and x is not store]
        todo = [x for x in tiers.layers if x not in done]
        # With several devices nobody knows yet where the layers to come will live.
        alone = tiers.device.type == "cpu" or torch.cuda.device_count() == 1
        unborn = max(self._tiered - len(self.layers), 0) if alone else 0
        size = store.layout.nbytes
        new = store.blocks_needed(groups, tokens)
        coming = new * (sum(x.layout.nbytes for x in todo) + unborn * size)
        held = sum(x.count * x.layout.nbytes for x in tiers.layers)
        batch = sum(len(group.rows) for group in groups)
        many = self._dense and not self._hosted(store, tokens)
        rooms = [self._room(x, x.length, batch) for x in done if x.dense or many]
        rooms += [self._room(x, x.length + tokens, batch) for x in todo if x.dense or many]
        # A first prefill reads nothing: its own keys and values are the answer.
        room = max(rooms, default=0) if store.length else 0
        size_in_tokens, total = store.layout.block_size, store.length + tokens
        unsealed = store.length % size_in_tokens or total % size_in_tokens
        tails = len(groups) * (sum(x.layout.nbytes for x in tiers.layers) + unborn * size) if unsealed else 0
        step = admission.Step(held, coming, room, tails, size, seals=total >= size_in_tokens)
        near = tiers.near.budget
        if not done:  # once for each step
            tiers.near.recover()
        needed = step.alone() if tiers.far is None else step.near()
        if needed > near.limit and not tiers.near.insist(needed):
            raise self._too_small(near, needed, store, tokens)
        if tiers.far is None:
            return
        far = tiers.far.budget
        needed = step.far(near.limit) + sum(t.far_bytes() for t in self._tiers.values() if t is not tiers)
        if needed > admission.whole_slots(far.limit, size):
            raise self._too_small(far, needed, store, tokens)

    def _room(self, store: LayerStore, tokens: int, batch: int) -> int:
        """Bytes of workspace in which a layer is read."""
        if self.options.host_attention and not store.dense and streamed.able(store):
            return streamed.workspace_bytes(store, tokens, batch)
        return store.workspace_bytes(tokens, batch)

    def _too_small(self, budget: Budget, needed: int, store: LayerStore, tokens: int) -> BudgetError:
        return BudgetError(
            f"{budget.tier}_budget is {budget.limit} bytes, but a step of {tokens} tokens on top of {store.length} "
            f"needs at least {needed} bytes ({needed / 2**20:.1f} MiB). Nothing was changed. Give "
            f"{budget.tier}_budget={needed} or "
            "more, drop tokens with `crop`, or `reset()`.",
            tier=budget.tier,
            needed=needed,
            budget=budget.limit,
        )

    # Reading

    def attend(
        self, store: LayerStore, length: int, epoch: int, repeats: int, query: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of `query` over a view of `store`; then begin to fetch for the layer that follows."""
        self._check_view(store, length, epoch)
        with self.steps.changing():
            self.counters.views_attended += 1
            query, dtype = calls.under_autocast(store, query)
            out = calls.attend(store, length, repeats, query, options, host=self.options.host_attention)
            self._prefetch_after(store, query.shape[2])
        return out.to(dtype)

    def attend_with(
        self, store: LayerStore, length: int, epoch: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of `query` over a view of `store`, with what torch's own kernel does not have."""
        self._check_view(store, length, epoch)
        with self.steps.changing():
            self.counters.views_attended += 1
            query, dtype = calls.under_autocast(store, query)
            out = calls.attend_with(store, length, query, params, host=self.options.host_attention)
            self._prefetch_after(store, query.shape[2])
        return out.to(dtype)

    def densify(self, store: LayerStore, length: int, epoch: int, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a view as tensors of the caller's own."""
        self._check_view(store, length, epoch)
        with self.steps.changing():
            keys, values = gather.own_kv(store, length)
            counters = self.counters
            counters.dense_fallbacks += 1
            counters.dense_fallback_bytes += keys.nbytes + values.nbytes
            counters.dense_fallback_ops[operation] = counters.dense_fallback_ops.get(operation, 0) + 1
            store.dense = store.attended
            self._prefetch_after(store, split.MOST_QUERIES + 1)
        return calls.without_gradient(store, keys, values)

    def _check_view(self, store: LayerStore, length: int, epoch: int) -> None:
        self.check_open()
        if store.epoch != epoch or self.layers.get(store.index) is not store or length > store.length:
            raise StaleViewError(
                f"A view of layer {store.index} is read after the cache dropped or reordered its tokens. Take it anew."
            )

    def _prefetch_after(self, store: LayerStore, queries: int) -> None:
        if store.tiers.far is None or (self._hosted(store, queries) and not store.dense):
            return
        following = self._following.get(store)
        if following is None:
            ring = sorted(store.tiers.layers, key=lambda x: x.index)
            self._following = {x: ring[(i + 1) % len(ring)] for i, x in enumerate(ring)} | {
                k: v for k, v in self._following.items() if k.tiers is not store.tiers
            }
            following = self._following[store]
        store.tiers.staging.prefetch(following)

    def _hosted(self, store: LayerStore, queries: int) -> bool:
        """Whether host threads attend to what is not on the device, so that it need not be fetched."""
        return self.options.host_attention and queries <= split.MOST_QUERIES and split.able(store)

    # Memory

    def _tiers_for(self, device: torch.device) -> Tiers:
        if device not in self._tiers:
            size = self.options.device_size(str(device))
            host = self._host_memory(device)
            near, far = host, None
            if device.type != "cpu" or size is not None:
                limit = resolve_size(
                    "device_budget",
                    "auto" if size is None else size,
                    free_device_memory(device),
                    DEVICE_RESERVE,
                    DEVICE_RESERVE_SHARE,
                )
                near, far = Memory(device, Budget("device", limit), elastic=True), host
            self._tiers[device] = Tiers(
                near,
                far,
                self._engine(device, self.counters),
                self.counters,
                write_through=self.options.write_through,
                poison=self._poison,
                far_pools=self._host_pools,
            )
        return self._tiers[device]

    def _host_memory(self, device: torch.device) -> Memory:
        lock_for = device if device.type == "cuda" else None
        if self._host is None:
            limit = resolve_size(
                "host_budget", self.options.host_budget, free_host_memory(), HOST_RESERVE, HOST_RESERVE_SHARE
            )
            self._host = Memory(torch.device("cpu"), Budget("host", limit), lock_for=lock_for)
        elif self._host.lock_for is None:
            self._host.lock_for = lock_for
        return self._host

    def clear(self) -> None:
        """Drop everything and give all memory back; counters begin anew."""
        for tiers in self._tiers.values():
            split.dismiss(tiers)
            tiers.close()
        for pool in self._host_pools.values():
            pool.close()
        self._tiers.clear()
        self._host_pools.clear()
        self._host = None
        self._following = {}
        for store in self.layers.values():
            store.epoch += 1
        self.layers.clear()
        self.counters = Counters()
        self.steps.reset()

    def close(self) -> None:
        """Give all memory, streams and registrations back. Idempotent."""
        if not self.closed:
            counters = self.counters
            self.clear()
            self.counters = counters
            self.closed = True

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self.closed:
            raise ClosedError("This TieredKVCache was closed. Make a new one.")

    # What a user sees

    def stats(self, resident_bytes: int) -> CacheStats:
        """A snapshot of all counters."""
        values = {name: getattr(self.counters, name) for name in Counters.__slots__}
        values["dense_fallback_ops"] = dict(self.counters.dense_fallback_ops)
        device = [t for t in self._tiers.values() if t.far is not None]
        host_near = [t for t in self._tiers.values() if t.far is None]
        return CacheStats(
            device=_tier_stats([t.near for t in device], [p for t in device for p in t.near_pools.values()], device),
            host=_tier_stats(
                [self._host] if self._host else [],
                [*self._host_pools.values(), *(p for t in host_near for p in t.near_pools.values())],
                host_near,
                sum(t.handover.nbytes for t in device),
            ),
            resident_bytes=resident_bytes,
            **values,
        )

    def residency(self, index: int) -> LayerResidency | None:
        """Where the blocks of a layer lie; None before its first update."""
        store = self.layers.get(index)
        if store is None:
            return None
        blocks = store.distinct_blocks()
        near = sum(b.near is not None for b in blocks)
        far = sum(b.far is not None for b in blocks)
        device, host = (near, far) if store.tiers.far is not None else (0, near)
        shared = sum(b.refs > 1 for b in blocks)
        return LayerResidency(index, "tiered", store.length, device, host, shared, len(blocks) * store.layout.nbytes)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count in the cache agrees with every other. For tests and debugging."""
        integrity.check(self._tiers.values(), self._host_pools.values(), self._host)


def _tier_stats(
    memories: Sequence[Memory], pools: Sequence[BlockPool], tiers: Sequence[Tiers], handover: int = 0
) -> TierStats:
    return TierStats(
        budget=sum(m.budget.limit for m in memories),
        bytes=sum(m.budget.used for m in memories),
        peak_bytes=sum(m.budget.peak for m in memories),
        workspace_bytes=sum(t.workspace.nbytes for t in tiers),
        handover_bytes=handover,
        page_locked_bytes=sum(m.page_locked for m in memories),
        used_blocks=sum(p.used for p in pools),
        free_blocks=sum(p.free for p in pools),
    )
