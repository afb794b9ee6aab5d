"""`AppendingForward`: the new tokens of a forward, admitted before anything changes, and appended layer by layer."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvtier.attention import split
from kvtier.attention.reader import LayerReader
from kvtier.attention.tangents import level, refuse_tangents
from kvtier.config import CacheOptions
from kvtier.forward import admission
from kvtier.forward.planned import LONG_PROMPT, PlannedForward
from kvtier.forward.schedule import Schedule
from kvtier.forward.steps import StepTracker
from kvtier.forward.token import NextToken
from kvtier.memory.access.change import ask, undone
from kvtier.memory.storage import system
from kvtier.memory.storage.layout import in_one_dtype
from kvtier.memory.storage.shortage import too_small
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.admission import Claim
from kvtier.stats import Progress
from kvtier.tables import sharing
from kvtier.tables.layer import LayerKV
from kvtier.tables.sharing import Alike, Group


class AppendingForward(PlannedForward):
    """Layers of a cache that take tokens, and the plan of a step.

    Args:
        memory: that the cache is in.
        options: checked options.
        expected: the layers that a forward updates, where that is known in advance.
        tiered: how many tiered layers there will be, where that is known in advance.
        dense: whether attention is expected to ask for one layer's KV as tensors, now.
        progress: called behind each layer of a forward of at least `LONG_PROMPT` tokens.
    """

    def __init__(
        self,
        memory: TieredMemory,
        options: CacheOptions,
        *,
        expected: frozenset[int] | None = None,
        tiered: int = 0,
        dense: Callable[[], bool] = lambda: True,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        super().__init__(memory, options)
        self.steps = StepTracker(
            expected,
            self._held.lengths,
            memory.recovery.cut_short,
        )
        self._tiered = tiered
        self._dense = dense
        self._step = -1
        self._admitted: set[ComputeDevice] = set()
        self._decoding = self._reserves = False
        self._alike: Alike | None = None
        self._groups: Sequence[Group] | None = None
        if progress is not None:  # who has no hook does not ask for one in every layer
            # Not by a reference to itself: what it holds is given back as soon as nobody uses it.
            self.append = partial(_append_and_tell, weakref.ref(self), progress)  # type: ignore[method-assign]

    def layer(self, index: int) -> LayerKV | None:
        """A layer's KV; None before its first update."""
        reader = self.readers.get(index)
        return None if reader is None else reader.layer

    # Updates

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        """Add keys `[batch, heads, tokens, k_dim]` and values `[batch, heads, tokens, v_dim]` to a layer.

        Raises:
            MismatchError, BudgetError, TransferError: the layer is as it was before.
            UnsupportedError: so it is, and they carry a tangent.
        """
        reader, graph = self.readers.get(index), False
        if keys.requires_grad or values.requires_grad:
            graph = torch.is_grad_enabled()
            keys, values = keys.detach(), values.detach()
        if level._current_level >= 0:
            refuse_tangents(keys, values)
        if keys.dtype is not values.dtype:
            keys, values = in_one_dtype(keys, values)
        memory = self.memory
        with memory.lock:
            memory.follow()
            if memory.recovery.has_garbage:
                memory.recovery.collect()
            begins = self._step != self.steps.count
            if begins:
                self._begin_step(keys.shape[2] if keys.dim() == 4 else 0)
            if reader is None:
                reader = self._new_layer(index, keys, values)
            layer = reader.layer
            if graph:
                layer.carries_graph, reader.repeat = True, None
            # A token that takes no new slot needs what the last token needed.
            if not (self._decoding and layer.append_token(keys, values)):
                self._append(layer, keys, values)
            elif begins and layer.device.spilled:
                self._plan(layer.device, 1)
            self._record.layers += 1
        return reader

    def next_token(self, index: int, reader: LayerReader) -> NextToken | None:
        """What appends the next token to a layer, if that took one now; None if it took more, or less."""
        return NextToken(self, index, reader) if self._decoding else None

    def tell(self, past: int, progress: Callable[[Progress], object]) -> None:
        """A layer has the new tokens behind `past` ones: tell the hook, if they are many."""
        tokens = self._record.tokens
        if tokens >= LONG_PROMPT:
            # Without a config, nobody knows in a first forward how many layers come.
            layers = self._tiered or len(self.steps.expected or ())
            ask(progress, Progress(tokens, past, self._record.layers, layers, time.perf_counter() - self._began))

    def _append(self, layer: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = layer.widened(keys, values)
        layer.check(keys, values)
        tokens = keys.shape[2]
        if tokens != 1:
            if not tokens:
                return
            self.steps.compare = True
        layer.device.poll()
        groups, self._alike = layer.group(keys, values, self._alike)
        differs = self._differs(groups)  # asked in every layer: the next one is compared with this one
        if differs or layer.device not in self._admitted:
            self._admit(layer, groups, tokens)
            self._plan(layer.device, tokens)
        if self._reserves:
            layer.reserve(tokens, groups)
        else:
            layer.append(keys, values, groups)

    def _differs(self, groups: Sequence[Group]) -> bool:
        """Whether rows share less in this layer than in the one that the step was admitted with."""
        before, self._groups = self._groups, groups
        if before is None or len(before) != len(groups):
            return before is not None
        return any(a.shared_blocks > b.shared_blocks for a, b in zip(before, groups, strict=True))

    def replace(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Let a layer hold these tokens and nothing else, all or nothing.

        What it held stays until the new tokens are in, so that for this long the budgets need room for both.

        Raises:
            MismatchError, BudgetError, TransferError: the layer holds what it held.
        """
        graph = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        refuse_tangents(keys, values)
        keys, values = in_one_dtype(keys.detach(), values.detach())
        memory, owner = self.memory, self._held.owner
        with memory.lock:
            memory.follow()
            if memory.recovery.has_garbage:
                memory.recovery.collect()
            old, claims, rooms = self.readers.get(index), dict(owner.claims), dict(self._rooms)
            new = self._make_layer(index, keys, values)
            new.layer.carries_graph = graph
            try:
                if keys.shape[2]:
                    groups, _ = new.layer.group(keys, values)
                    self._admit_new(self._held.layers_on(new.device), new.layer, groups, keys.shape[2])
                    new.layer.append(keys, values, groups)
            except Exception as error:
                if undone(error):
                    self._drop(new)
                    owner.claims, self._rooms = claims, rooms
                raise
            self._install(new)
            if old is not None:
                self._drop(old)
                self._changed(old.device)
            self._changed(new.device)

    def restore(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give a layer tokens, as part of a step that nobody reads and that `steps.end` ends.

        Args:
            keys, values: as for `append`, behind what the layer holds.

        Raises:
            BudgetError, TransferError: the layer holds what it held.
        """
        dense, self._dense = self._dense, lambda: False
        before = self.readers[index].layer.length if index in self.readers else 0
        try:
            with self.steps.changing():
                if before and not self.steps.began:  # behind a step that has ended: this one is admitted by itself
                    self.steps.update(index, before)
                self.append(index, keys, values)
                if keys.shape[2]:
                    self.steps.began[index] = before
        finally:
            self._dense = dense

    def reserve(self, index: int, tokens: int) -> None:
        """As `restore`, for two or more tokens that are written into the layer's blocks afterwards. It has one row, or
        none yet. Whoever writes them calls the layer's `complete`, and crops those that are not written."""
        layer = self.readers[index].layer
        layout, one = layer.layout, torch.empty((), dtype=layer.layout.dtype, device=layer.device.device)
        # Of their shape, and of one element.
        keys, values = (
            one.expand(1, heads, tokens, dim)
            for heads, dim in ((layout.k_heads, layout.k_dim), (layout.v_heads, layout.v_dim))
        )
        self._reserves = True
        try:
            self.restore(index, keys, values)
        finally:
            self._reserves = False

    def _admit_new(self, others: list[LayerKV], layer: LayerKV, groups: Sequence[Group], tokens: int) -> None:
        """Refuse, before anything changes, a new layer that does not fit in addition to all that there is."""
        refused = self.memory.admit(
            self._held.owner,
            layer.device,
            lambda limit: admission.claim(
                [*others, layer],
                others,
                layer,
                groups,
                tokens,
                to_come=0,
                host_attention=self.options.host_attention,
                dense=self._dense(),
                limit=limit,
            ),
        )
        if refused is not None:
            raise too_small(
                *refused,
                f"{tokens} tokens for layer {layer.index}, besides what it holds until then, need",
                self.memory.others(self._held.owner),
            )
        self._rooms[layer.device] = self._held.owner.claims[layer.device].room

    def _drop(self, reader: LayerReader) -> None:
        """A layer ends. The caller holds the lock."""
        self._held.drop(reader)
        self._schedules.pop(reader.device, None)

    def _changed(self, device: ComputeDevice) -> None:
        """Fewer blocks are held: claim no more, and give back what is free and much."""
        self._admitted.discard(device)
        self._rest(device)
        self.memory.trim()

    def _remove(self, index: int) -> None:
        reader = self.readers.pop(index, None)
        if reader is not None:
            with self.memory.lock, self.memory.change:
                self._drop(reader)

    def undo_first(self) -> None:
        """After a refusal: take back what it was the first forward of, where nobody knows yet which layers there are,
        so that `crop(0)` could not tell it from one that is finished."""
        if self.steps.expected is None and not any(self.steps.began.values()):
            with self.steps.changing():
                # The layer that refused began nothing, but it may exist by now.
                for index in [i for i, x in self.readers.items() if i in self.steps.began or not x.layer.length]:
                    self._remove(index)
                self.steps.began = {}

    def early(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make a layer from tensors that may have no tokens."""
        if index not in self.readers:
            with self.steps.changing():  # noqa: SIM117 - a test takes each lock away in turn
                with self.memory.lock:
                    if self.memory.recovery.has_garbage:
                        self.memory.recovery.collect()
                    self._new_layer(index, *in_one_dtype(keys, values))

    def _new_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        reader = self._make_layer(index, keys, values)
        self._install(reader)
        return reader

    def _install(self, reader: LayerReader) -> None:
        self._held.readers[reader.layer.index] = reader
        self._schedules.pop(reader.device, None)
        self._admitted.discard(reader.device)

    def _make_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        device = self.memory.on(keys.device)
        self._at_rest_elsewhere(device)
        return self._held.make(index, device, keys, values, self.options)

    def _at_rest_elsewhere(self, device: ComputeDevice) -> None:
        """A layer comes to a device: those that were expected on others claim no room there any more."""
        others = self._held.devices()
        if device in others:
            return
        for other in others:
            self._held.rest(other, self._rooms.get(other, 0))
            self._admitted.discard(other)

    # A step

    def _begin_step(self, tokens: int) -> None:
        """A forward begins: the last one is over and its record is made."""
        self._step = self.steps.count
        self._decoding = self._record.tokens == tokens == 1
        self._admitted.clear()
        self._alike = self._groups = None
        self._begin_record(tokens)

    def admit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuse a step that will not fit, for a step whose first layer is not tiered, but given these.

        Rows that are equal in this layer are equal in those to come.

        Raises:
            BudgetError: nothing was changed.
        """
        tokens = keys.shape[2]
        with self.memory.lock:
            self.memory.follow()
            if self.memory.recovery.has_garbage:
                self.memory.recovery.collect()
            self._begin_step(tokens)
            for device in self._held.devices():
                first = self._held.layers_on(device)[0]
                rows = first.rows if len(first.rows) == keys.shape[0] else ()
                self._groups, self._alike = sharing.group_rows(rows, first.layout, keys, values)
                self._admit(first, self._groups, tokens)
                self._plan(device, tokens)

    def _admit(self, layer: LayerKV, groups: Sequence[Group], tokens: int) -> None:
        """Refuse, before anything changes, a step that will not fit: this layer stands for those still to come."""
        device, owner = layer.device, self._held.owner
        claim = partial(self._claim, layer, groups, tokens)
        # Layers that nobody has seen yet are taken to be where the last new one is.
        to_come = max(self._tiered - len(self.readers), 0)
        refused = self.memory.admit(owner, device, partial(claim, to_come))
        if refused is not None and to_come and system.has_alternatives(device.device):
            # They may be on other devices: whether this step fits is known when they come.
            refused = self.memory.admit(owner, device, partial(claim, 0)) and refused
        if refused is not None:
            self._record.tokens = 0  # no step: nothing to learn from, and the next one is not like it
            what = f"A step of {tokens} token{'' if tokens == 1 else 's'} on top of {layer.length}"
            ahead = (self.options.max_tokens or 0) > layer.length + tokens
            raise too_small(
                *refused,
                f"{what}, up to max_tokens={self.options.max_tokens}, needs" if ahead else f"{what} needs",
                self.memory.others(self._held.owner),
            )
        room = owner.claims[device].room
        self._rooms[device] = room
        self._admitted.add(device)
        workspace = owner.workspaces.get(device)
        if workspace is not None:
            workspace.shrink(room)

    def _claim(self, layer: LayerKV, groups: Sequence[Group], tokens: int, to_come: int, limit: int) -> Claim:
        """What this cache needs on a layer's device for a step, `to_come` unseen layers included."""
        layers = self._held.layers_on(layer.device)
        done = [x for x in layers if x.index in self.steps.began and x is not layer]
        later = max((self.options.max_tokens or 0) - layer.length - tokens, 0)
        found = [
            admission.claim(
                layers,
                done,
                layer,
                groups,
                tokens,
                later=more,
                to_come=to_come,
                host_attention=self.options.host_attention,
                dense=self._dense(),
                limit=limit,
            )
            for more in {0, later}
        ]
        return found[0] if len(found) == 1 else found[0].union(found[1])

    def _in_place(self, schedule: Schedule, tokens: int) -> list[bool]:
        """For each layer, whether what is on the host need not be fetched: host threads attend to it, or nobody reads
        it."""
        began, found = self.steps.began, list[bool]()
        # A model that makes tensors of views reads all of it itself.
        hosted = self.options.host_attention and self._dense()
        # Asked in every step: of steps that decode it is kept, until layers lose tokens (`Schedule.drop`).
        decodes = self._decoding and not torch.is_grad_enabled()
        if decodes and schedule.in_place is not None and schedule.in_place[0] == hosted:
            return schedule.in_place[1]
        pools, served, keep = None, False, decodes
        for reader in schedule.readers:
            layer = reader.layer
            if layer.blocks.pools is not pools or layer.carries_graph:  # layers of one layout are served alike
                pools, served = layer.blocks.pools, hosted and split.can_attend(layer, tokens)
                if layer.carries_graph:
                    pools = None
            # First tokens are their own keys and values.
            empty = not began.get(layer.index, layer.length)
            found.append(served or empty)
            keep = keep and not empty
        if keep:
            schedule.in_place = hosted, found
        return found


def _append_and_tell(
    forward: weakref.ref[AppendingForward],
    progress: Callable[[Progress], object],
    index: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> LayerReader:
    """`Forward.append` where there is a hook."""
    this = forward()
    assert this is not None, "whoever calls holds it"
    reader = AppendingForward.append(this, index, keys, values)
    this.tell(reader.layer.length - keys.shape[2], progress)
    return reader
