"""`TieredKVCache`: the cache that `generate` is given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.configuration_utils import PretrainedConfig

from kvtier.config import CacheOptions, Size
from kvtier.errors import ConfigError, MismatchError
from kvtier.hf import dynamo
from kvtier.hf.layer import TieredLayer
from kvtier.hf.resident import (
    WINDOW,
    RecurrentFace,
    RecurrentStates,
    check_resident,
    resident_bytes,
    transformers_layers,
    updated_by_every_forward,
)
from kvtier.metrics import CacheStats
from kvtier.runtime import EngineFactory, Runtime, default_engine
from kvtier.types import LayerResidency, Residency


class TieredKVCache(RecurrentFace):
    """A KV cache whose blocks lie on the device and in host memory, each where there is room, with the tokens of
    `DynamicCache`.

        model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB"))

    Full-attention layers are tiered. Layers with a sliding window, chunked or linear attention, an indexer or shared KV
    stay resident in Transformers' own layer classes, outside the budgets; `stats.resident_bytes` counts them. Nothing
    is allocated before the first forward.

    Args:
        config: the model's config. Needed for models with layers that are not full attention; without it, every layer
            is taken for full attention, as with `DynamicCache()`.
        device_budget: bytes of device memory for KV, staging and workspace included: an int, a text (`"4GiB"`), a
            share of what is free (`0.5`), `"auto"` (what is free less a fifth, at least 1 GiB), or a mapping from
            device (`"cuda:0"`) to any of these. The default is `"auto"` on an accelerator. On a CPU model the default
            is no device tier at all: everything lies in the host tier; a budget there emulates one in RAM.
        host_budget: bytes of host memory for KV, written the same way; `"auto"` leaves a fifth, at least 2 GiB.
        block_size: tokens per block, the unit of placement and sharing. `"auto"` is 256 on a CPU model without a device
            tier, where long runs are read fastest, and 64 otherwise.
        write_through: share of the device budget in use from which full blocks are copied to the host in the
            background, so that evicting them later moves no bytes; 0 copies each block as soon as it is full.
        host_attention: let CPU threads attend to the blocks in host memory where they lie, when few tokens are decoded
            at a time. False: such blocks are fetched, and logits are those of `DynamicCache` bit for bit; with it, they
            agree to rounding (1e-4 in fp32).

    Raises:
        ConfigError: an option that is malformed.

    A cache serves one model and one thread at a time. `crop`, `reorder_cache`, `batch_repeat_interleave`,
    `batch_select_indices` and `reset` are those of Transformers; `close`, or leaving a `with` block, gives all memory
    back.
    """

    def __init__(
        self,
        config: PretrainedConfig | None = None,
        *,
        device_budget: Size | Mapping[str, Size] | None = None,
        host_budget: Size = "auto",
        block_size: int | Literal["auto"] = "auto",
        write_through: float = 0.5,
        host_attention: bool = True,
    ) -> None:
        if config is not None and not hasattr(config, "get_text_config"):
            raise ConfigError(
                f"config={type(config).__name__} is not a Transformers config. Pass `model.config`; options are "
                "keywords."
            )
        self._config = config
        self._options = CacheOptions.parse(device_budget, host_budget, block_size, write_through, host_attention)
        self._setup()

    def _setup(self, engine: EngineFactory = default_engine, *, poison: bool = False) -> None:
        dynamo.keep_out()
        layers = transformers_layers(self._config)
        tiered = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self._runtime = Runtime(
            self._options,
            expected=updated_by_every_forward(layers),
            tiered=len(tiered),
            engine=engine,
            poison=poison,
            dense=getattr(self._config, "_attn_implementation", None) != "eager",
        )
        for i in tiered:
            layers[i] = TieredLayer(self._runtime, i)
        self.layers = layers
        self._recurrent = RecurrentStates(self._runtime, layers)
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.layer_class_to_replicate = TieredLayer if not layers else None
        self.offloading = False
        self._finalizer = weakref.finalize(self, self._runtime.close)
        self._finalizer.atexit = False  # the process gives its memory back anyway

    # The forward

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the tokens of one layer and return all of its keys and values.

        Args:
            key_states: `[batch, heads, tokens, k_dim]`, copied.
            value_states: `[batch, heads, tokens, v_dim]`, copied.
            layer_idx: the layer.

        Returns:
            Keys and values, `[batch, heads, all tokens, dim]`: the arguments, contiguous, where there is no past; views
            that behave like tensors where there is.

        Raises:
            BudgetError: the budgets are too small; names the smallest that works. Nothing was changed by this layer.
            MismatchError: not the model, dtype, device or batch that the cache holds.
            InterruptedStepError: the last forward did not finish.
            ConcurrentUseError, TransferError, ClosedError: as they say.
        """
        layers = self.layers
        if layer_idx >= len(layers):
            self._add_layers(layer_idx)
        layer = layers[layer_idx]
        if type(layer) is TieredLayer:
            return layer.update(key_states, value_states, *args, **kwargs)
        self._runtime.check_open()
        steps = self._runtime.steps
        check_resident(layer_idx, layer, key_states, value_states)
        with steps.changing():
            before = {name: vars(layer)[name] for name in WINDOW if name in vars(layer)}
            length = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
            begins = steps.update(layer_idx, length)
            self._runtime.counters.steps += begins
            try:
                if begins:
                    self._windows.clear()
                    self._runtime.admit(key_states.shape[2])
                keys, values = layer.update(key_states, value_states, *args, **kwargs)
            except BaseException:
                vars(layer).update(before)
                steps.undo(layer_idx)
                raise
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past:
                # The layer keeps slices of these: holding them for a step costs nothing and lets `crop` undo it.
                self._windows[layer_idx] = (keys, values)
        return keys, values

    def _add_layers(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is None:
            raise MismatchError(
                f"Layer {layer_idx} of a cache that was made for {len(self.layers)} layers: this is not the model "
                "whose config it was given."
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(TieredLayer(self._runtime, len(self.layers)))

    # Rows and length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Drops the tokens of an unfinished forward first."""
        self._runtime.check_open()
        tokens_to_remove = int(tokens_to_remove)  # 5.17 passes a tensor after assisted decoding
        self._runtime.steps.check_sound()
        self._runtime.steps.settle()
        unfinished = not self._runtime.steps.complete
        if unfinished:
            self._drop_unfinished()
        if tokens_to_remove:
            self._change("crop", tokens_to_remove)
            return
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer) and not layer.get_seq_length():
                continue  # it would look at keys that it does not have
            # Transformers trims what was recorded of the past and refuses where nothing was: no error, nothing to undo.
            past_gone = isinstance(layer, LinearAttentionCacheLayerMixin) or (
                isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
            )
            if not past_gone or layer.record_past:
                layer.crop(0)
        self._end_step()

    def _drop_unfinished(self) -> None:
        steps = self._runtime.steps
        if not steps.undoable:
            raise steps.interrupted()
        fresh = transformers_layers(self._config)
        for i, before in steps.began.items():
            assert type(i) is int, "a recurrent state cannot be undone"
            layer = self.layers[i]
            if before == 0 and not isinstance(layer, TieredLayer):
                self._renew(i, fresh[i])
            elif i in self._windows:
                self._restore_window(layer, before, *self._windows[i])
            else:
                layer.crop(before - layer.get_seq_length())
        self._end_step()

    def _restore_window(self, layer: Any, before: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give a sliding layer back the window it had: the head of what its last `update` returned."""
        tokens = layer.get_seq_length() - before
        layer.keys, layer.values = keys[:, :, :-tokens], values[:, :, :-tokens]
        layer.cumulative_length = before

    def _change(self, method: str, argument: Any) -> None:
        """Call a method of every layer, all or none: those of Transformers first, which refuse before they change."""
        changed = False
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, TieredLayer)):
            try:
                getattr(layer, method)(argument)
            except Exception:
                if changed:
                    self._runtime.steps.break_off()
                raise
            changed = True
        self._end_step()

    def _end_step(self) -> None:
        self._runtime.steps.end()
        self._windows.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` continue what row `beam_idx[i]` held. Moves no keys and values of tiered layers."""
        self._check_whole()
        self._change("reorder_cache", beam_idx.to("cpu"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share their blocks until they part."""
        self._check_whole()
        self._change("batch_repeat_interleave", int(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._check_whole()
        # To the host once, not once for each layer.
        self._change("batch_select_indices", indices.to("cpu") if isinstance(indices, torch.Tensor) else indices)

    def _check_whole(self) -> None:
        self._runtime.check_open()
        self._runtime.steps.check_whole()

    def reset(self) -> None:
        """Empty the cache and give its memory back, whatever state it is in. Options stay, counters begin anew."""
        self._runtime.check_open()
        self._runtime.clear()
        self._windows.clear()
        fresh = transformers_layers(self._config)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, TieredLayer):
                layer._assigned.clear()
            else:
                self._renew(i, fresh[i])
        self._recurrent.watch(self.layers)

    def _renew(self, index: int, fresh: Any) -> None:
        """Put an empty layer in the place of one of Transformers'."""
        if hasattr(self.layers[index], "record_past"):
            fresh.record_past = self.layers[index].record_past
        self.layers[index] = fresh

    # What a user sees

    @property
    def is_compileable(self) -> bool:
        """False: blocks move, which a compiled graph could not follow."""
        return False

    @property
    def stats(self) -> CacheStats:
        """Bytes and blocks per tier, bytes moved, hits, stalls, fallbacks: a snapshot."""
        return self._runtime.stats(sum(resident_bytes(layer) for layer in self.layers))

    def residency(self) -> Residency:
        """Where the KV of each layer lies. Printing it gives a table."""
        rows = []
        for i, layer in enumerate(self.layers):
            tiered = self._runtime.residency(i) if isinstance(layer, TieredLayer) else None
            if tiered is not None:
                rows.append(tiered)
                continue
            tokens = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
            kind = "tiered" if isinstance(layer, TieredLayer) else type(layer).__name__
            rows.append(LayerResidency(i, kind, tokens, 0, 0, 0, resident_bytes(layer)))
        return Residency(tuple(rows))

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging; walks every block."""
        self._runtime.check_integrity()

    def __repr__(self) -> str:
        if self._runtime.closed:
            return "TieredKVCache(closed)"
        stores = self._runtime.layers.values()
        if not stores:
            return f"TieredKVCache({len(self.layers) or 'any number of'} layers, empty)"
        first = next(iter(stores))
        stats = self.stats
        tiers = [
            f"{name} {tier.bytes / 2**20:.1f} of {tier.budget / 2**20:.1f} MiB"
            for name, tier in (("device", stats.device), ("host", stats.host))
            if tier.budget
        ]
        return (
            f"TieredKVCache({len(self.layers)} layers, {len(stores)} tiered, {first.batch} x {first.length} tokens, "
            f"{', '.join(tiers)})"
        )

    # Life

    def close(self) -> None:
        """Give all memory back. The cache cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> TieredKVCache:
        self._runtime.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        steps = self._runtime.steps
        steps.end()
        layers: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, TieredLayer):
                layers.append(layer.dense("copy"))
            else:
                layers.append(layer)
        return {"config": self._config, "options": self._options, "layers": layers, "expected": steps.expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._config, self._options = state["config"], state["options"]
        self._setup()
        for i, content in enumerate(state["layers"]):
            if content is not None and not isinstance(content, tuple):
                self.layers[i] = content
                continue
            if i >= len(self.layers):
                self._add_layers(i)
            if content is not None:
                self._runtime.append(i, *content)
        steps = self._runtime.steps
        if state["expected"] is not None:
            steps.expected = (steps.expected or frozenset()) | state["expected"]
        self._recurrent.watch(self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredKVCache:
        import copy

        state = self.__getstate__()
        # What was made for this copy is copied once, into blocks; only Transformers' own layers need copying here.
        state["layers"] = [x if x is None or isinstance(x, tuple) else copy.deepcopy(x, memo) for x in state["layers"]]
        clone = type(self).__new__(type(self))
        clone.__setstate__(state)
        memo[id(self)] = clone
        return clone
