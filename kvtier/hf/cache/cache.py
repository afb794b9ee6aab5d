"""`TieredKVCache`: the cache that `generate` is given."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from transformers.cache_utils import CacheLayerMixin
from transformers.configuration_utils import PretrainedConfig

from kvtier.config import CacheOptions, Size, checks_names
from kvtier.cpu import loader
from kvtier.errors import BudgetError, ConfigError, KVTierError, MismatchError
from kvtier.forward.forward import Forward
from kvtier.hf.attention import dynamo
from kvtier.hf.attention.sdpa import lengthen_sdpa, shorten_sdpa
from kvtier.hf.cache import rows
from kvtier.hf.cache.changes import Changes
from kvtier.hf.cache.copies import content_of, fill, pickle_by_value
from kvtier.hf.cache.layer import TieredLayer
from kvtier.hf.cache.missing import GrowingLayers, NeverGiven, NoHalfError
from kvtier.hf.cache.options import check_config, check_hook, memory_of
from kvtier.hf.cache.recurrent import RecurrentFace, RecurrentStates
from kvtier.hf.cache.report import explanation, residency, summary
from kvtier.hf.cache.resident import ResidentLayers, check_rows, croppable, resident_bytes, warn_if_none_is_tiered
from kvtier.hf.cache.rows import row_indices, whole_number
from kvtier.hf.callers.caller import Caller, given_image
from kvtier.hf.callers.histories import check_cached, check_longer, common_prefix
from kvtier.hf.callers.threads import check_alone
from kvtier.hf.models.layers import (
    check_model,
    cross_attention_layers,
    encoder_decoder,
    is_full_attention,
    looped,
    own_config,
    transformers_layers,
    updated_by_every_forward,
)
from kvtier.hf.models.names import CACHE
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policies.names import PolicyName
from kvtier.planning.policy import Policy
from kvtier.planning.reports.explain import Explanation
from kvtier.stats import CacheStats, Progress, Residency


class TieredKVCache(RecurrentFace, metaclass=NeverGiven):
    """A KV cache whose blocks are on the device and in host memory, each where there is room, with the tokens of
    `DynamicCache`.

        model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB"))

    Full-attention layers are tiered. Layers with a sliding window, chunked or linear attention, an indexer or shared
    KV, and those that keep KV next to a recurrent state, stay resident in Transformers' own layer classes, outside the
    budgets; `stats.resident_bytes` counts them. Where all that grows with the context is in such layers, a
    `RuntimeWarning` says so. Nothing is allocated before the first forward.

    Args:
        config: the model's config. Needed for models with layers that are not full attention; without it, every layer
            is taken for full attention, as with `DynamicCache()`.
        device_budget, host_budget: bytes for KV on the device and in host memory: an int, a string (`"4GiB"`), a share
            of what is free (`0.5`), or `"auto"`, what is free less a reserve; for the device also a mapping from
            devices. The default is `"auto"`, but on a CPU model no device tier. `kvtier.TieredMemory` has more of it,
            and `resize` changes them later.
        block_size: tokens per block, the unit of placement and sharing. `"auto"` is 256 on a CPU model without a device
            tier, where long runs are read fastest, and 64 otherwise.
        write_through: share of the device budget in use from which full blocks are copied to the host in the
            background, so that evicting them later moves no bytes; 0 copies each block as soon as it is full.
        host_attention: let CPU threads attend to the blocks in host memory where they are, when few tokens are decoded
            at a time. False: such blocks are fetched, one layer's KV has to fit as a tensor into the device budget (on
            a CPU model without a device tier into the host budget), and logits are those of `DynamicCache` bit for bit;
            with it, they agree to rounding (1e-4 in fp32).
        max_tokens: tokens per row that the cache will hold at the most. Budgets that are too small for so many are
            then refused at the first forward, with the budget that is enough for all of them. It is no limit: more
            tokens go in as long as the budgets hold them.
        policy: decides what is fetched, evicted and written back: a `kvtier.Policy`, which `write_through` does not go
            with, or a name. "default" attends on the host to what is spilled; "adaptive" measures what the link and the
            host take, and shares the work between them, where copies go on while the device computes (elsewhere it is
            the default); "all-attend", "all-fetch", "pie" (Pie, section 3.3) and "neo" (Neo, section 3.1) are for
            comparison. Without a device tier there is nothing to decide.
        audit: whether blocks in host memory are compared with what was written there: "sampled" (the default), "full"
            or "off"; see `kvtier.TieredMemory`.
        memory: a `kvtier.TieredMemory` that other caches may use too; budgets, policy and audit are set there.
        progress: called with a `kvtier.Progress` behind each tiered layer of a forward of at least 1024 new tokens, as
            a long prompt is; an exception that it raises ends the forward, as any in a model does. Copies of the cache
            have none.

    Raises:
        ConfigError: an option that is malformed; a `config` of a model that does not generate; KVTIER_CPU names an
            instruction set that is not there.

    A cache serves one model and one thread at a time. `crop`, `reorder_cache`, `batch_repeat_interleave`,
    `batch_select_indices` and `reset` are those of Transformers; `close`, or leaving a `with` block, gives all memory
    back.
    """

    #: Whether it warns if no forward used it.
    _tells_unused = True
    #: Which of Transformers' layers are tiered.
    _is_tiered = staticmethod(is_full_attention)

    @checks_names
    def __init__(
        self,
        config: PretrainedConfig | None = None,
        *,
        device_budget: Size | Mapping[str, Size] | None = None,
        host_budget: Size | None = None,
        block_size: int | Literal["auto"] = "auto",
        write_through: float | None = None,
        host_attention: bool = True,
        max_tokens: int | None = None,
        policy: Policy | PolicyName | None = None,
        audit: Literal["off", "sampled", "full"] | None = None,
        memory: TieredMemory | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        check_config(config)
        self._config = config
        self._options = CacheOptions.parse(block_size, host_attention, max_tokens)
        check_hook(progress)
        loader.check_environment()
        self._setup(
            memory_of(
                memory,
                device_budget=device_budget,
                host_budget=host_budget,
                write_through=write_through,
                policy=policy,
                audit=audit,
            ),
            progress,
        )
        warn_if_none_is_tiered(config, self.layers)

    def _setup(self, memory: TieredMemory, progress: Callable[[Progress], object] | None = None) -> None:
        dynamo.keep_out()
        pickle_by_value(type(self))
        shorten_sdpa(self)
        layers = transformers_layers(self._config)
        config = None if self._config is None else own_config(self._config)
        kinds = tuple(type(layer) for layer in layers)
        check = partial(check_model, type(self._config).__name__, kinds) if layers else lambda config: None
        self._caller = Caller(config, check)
        tiered = [i for i, layer in enumerate(layers) if self._is_tiered(layer)]
        sometimes = cross_attention_layers(self._config)
        self._forward = Forward(
            memory,
            self._options,
            expected=updated_by_every_forward(layers, sometimes),
            tiered=len(tiered),
            dense=self._caller.reads_workspace,
            progress=progress,
        )
        steps = self._forward.steps
        steps.inside = self._caller.places.in_forward
        steps.ordered, steps.sometimes, steps.given_image = not looped(self._config), sometimes, given_image
        self._caller.check_alone = partial(check_alone, self._caller.places, steps)
        for i in tiered:
            layers[i] = TieredLayer(self._forward, i, self._caller)
        self.layers = layers or GrowingLayers()
        self._resident = ResidentLayers(self._forward, self._caller, self.layers)
        self._recurrent = RecurrentStates(self._forward, self.layers)
        self._changes = Changes(self._forward, self._resident, self.layers, partial(transformers_layers, self._config))
        self.layer_class_to_replicate = TieredLayer if not layers else None
        #: A forward used it, or nobody needs to be told that none did.
        self._was_used = False
        #: Tokens that it held when rows took the places of others; None: they did not.
        self._parted: int | None = None
        self.offloading = False

    def __getattr__(self, name: str) -> Any:
        """Only for what is missing: an encoder-decoder asks for the halves of an `EncoderDecoderCache`."""
        if name in ("is_updated", "self_attention_cache", "cross_attention_cache"):
            raise NoHalfError(str(encoder_decoder(self._config is not None)))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)

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
            BudgetError: the budgets are too small; names the smallest that works. The cache is as it was before this
                forward, unless recurrent layers have changed their states in it.
            MismatchError: not the model, dtype, device or batch that the cache holds.
            InterruptedStepError: the last forward did not finish.
            ConcurrentUseError, TransferError, ClosedError: as they say.
        """
        layers = self.layers
        if layer_idx >= len(layers):
            self._add_layers(layer_idx)
        layer = list.__getitem__(layers, layer_idx)  # it is there: in less time than `GrowingLayers` takes to say so
        try:
            if type(layer) is TieredLayer:
                views = layer.next_token(key_states, value_states)
                if views is not None:
                    return views
                return layer.update(key_states, value_states, *args, **kwargs)
            return self._resident.update(layer_idx, key_states, value_states, *args, **kwargs)
        except BudgetError:
            self._was_used = True
            self._roll_back()
            raise
        except BaseException:
            self._was_used = True
            raise

    def _roll_back(self) -> None:
        if not self._changes.roll_back():
            self.reset()

    def _add_layers(self, layer_idx: int) -> None:
        if self.layer_class_to_replicate is None:
            raise MismatchError(
                f"Layer {layer_idx} of a cache that was made for {len(self.layers)} layers: this is not the model "
                "whose config it was given. Make the cache with that model's own config: TieredKVCache(model.config)."
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(TieredLayer(self._forward, len(self.layers), self._caller))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As in Transformers: tokens that a layer will show after `query_length` more, and where they begin."""
        self._forward.steps.mask_made()
        return super().get_mask_sizes(query_length, layer_idx)

    # Rows and length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Drops the tokens of an unfinished forward first.

        Raises:
            ConfigError: not a whole number, or a positive one where Transformers takes none.
            UnsupportedError: a layer has let go of what it would go back to, as a full sliding window has, or keeps a
                recurrent state. Nothing was cropped.
        """
        self._check_ours()
        tokens_to_remove = whole_number("crop", tokens_to_remove)
        self._changes.crop(tokens_to_remove)
        if tokens_to_remove and self._parted is not None and self.get_seq_length() <= self._parted:
            self._parted = None

    def activate_past_recording(self) -> None:
        """As in Transformers, for drafts that are tried and cropped. What `update` returned is then read behind a crop
        too, as long as somebody holds it."""
        super().activate_past_recording()
        self._caller.drafts = True

    def keep_prefix(self, new_ids: Any, held_ids: Any) -> int:
        """Crop to what a new prompt has in common with what the cache holds. Then `generate` continues rightly.

            cache.keep_prefix(inputs.input_ids, held_ids)
            held_ids = model.generate(**inputs, past_key_values=cache)

        For callers that keep token ids; a `kvtier.ConversationStore` keeps them itself, for any number of histories.

        Args:
            new_ids: the next prompt, `[rows, tokens]`, or one row of numbers. Padded as what is held, if at all.
            held_ids: what the cache was given, answers included, the same way: what the last `generate` returned.

        Returns:
            Tokens that are kept, fewer than the prompt has: at least its last one is computed. 0, and the cache is
            empty, where a layer cannot take tokens back: behind a full sliding window, or with recurrent states. After
            a beam search no more than the prompt of that: the rows of the cache are not those that it returned.

        Raises:
            ConfigError, MismatchError: not the ids of this cache; nothing was changed.
            InterruptedStepError: the last forward did not finish.
        """
        self._check_whole()
        held = self.get_seq_length()
        kept = common_prefix(new_ids, held_ids, held, self._batch() if held else None)
        kept = kept if self._parted is None else min(kept, self._parted)
        if kept == held:
            return kept
        if kept and all(map(croppable, self.layers)):
            self.crop(kept - held)
            return kept
        self._was_used = True  # `reset` begins to count again
        self.reset()
        return 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` continue what row `beam_idx[i]` held. Moves no keys and values of tiered layers.

        Raises:
            ConfigError, MismatchError: not the indices of rows, `[rows]`; nothing was changed.
        """
        self._check_whole()
        picked = row_indices("reorder_cache", beam_idx, self._batch(), mask=False)
        if self._parted is None and self._counts_tokens and picked.tolist() != list(range(len(picked))):
            self._parted = self.get_seq_length()
        self._changes.pick("reorder_cache", picked)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share their blocks until they part.

        Raises:
            ConfigError: not a whole number of at least 1; nothing was changed.
            UnsupportedError: a layer keeps a recurrent state; nothing was changed. `reorder_cache` repeats rows too.
        """
        self._check_whole()
        repeats = rows.repeats(repeats)
        check_rows(self.layers, "batch_repeat_interleave")
        self._changes.call("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, or those where a mask of bools is true.

        Raises:
            ConfigError, MismatchError: not the indices of rows, `[rows]`; nothing was changed.
            UnsupportedError: a layer keeps a recurrent state; nothing was changed. `reorder_cache` picks rows too.
        """
        self._check_whole()
        picked = row_indices("batch_select_indices", indices, self._batch(), mask=True)
        check_rows(self.layers, "batch_select_indices")
        self._changes.pick("batch_select_indices", picked)

    @property
    def _counts_tokens(self) -> bool:
        """False of recurrent states alone: nobody knows of how many tokens they are."""
        return not self.layers or any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    def _batch(self) -> int | None:
        """Rows; None before the first update."""
        batches = (x.batch if isinstance(x, TieredLayer) else rows.batch_of(x) for x in self.layers)
        return next((batch for batch in batches if batch), None)

    def _check_ours(self) -> None:
        self._forward.check_open()
        self._caller.check_alone()

    def _check_whole(self) -> None:
        self._check_ours()
        self._forward.steps.check_whole()

    def reset(self) -> None:
        """Empty the cache and give its memory back, whatever state it is in. Options stay, counters begin at 0."""
        self._check_ours()
        self._was_used = self._was_used or self._forward.counters.steps > 0  # they begin again
        self._forward.clear()
        self._parted = None
        self._caller.forget()
        self._changes.renew()
        self._recurrent.watch(self.layers)

    # What a user sees

    @property
    def _is_user_defined(self) -> bool:
        """Set by `generate` on the cache it is given, before anything else."""
        return vars(self).get("_given", False)

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        model = sys._getframe(1).f_locals.get("self")
        config = getattr(model, "config", None)
        if isinstance(config, PretrainedConfig) and config.is_encoder_decoder:
            raise encoder_decoder(self._config is not None)
        if value:
            self._check_call(sys._getframe(1))
        self._given = value

    def _check_call(self, frame: FrameType) -> None:
        """Raise `ConfigError` where a `generate` is told to use no cache, and `MismatchError` where its prompt is
        covered whole; other errors are for its forward."""
        self._caller.check_alone()
        check_cached(frame)
        if not self._counts_tokens:
            return
        try:
            self._check_whole()
        except KVTierError:
            return
        check_longer(frame, self.get_seq_length())

    @property
    def is_compileable(self) -> bool:
        """False: blocks move, which a compiled graph could not follow."""
        return False

    @property
    def stats(self) -> CacheStats:
        """Bytes and blocks per tier, bytes moved, hits, stalls, fallbacks: a snapshot. Prints as a table."""
        return self._forward.stats(sum(resident_bytes(layer) for layer in self.layers))

    def residency(self) -> Residency:
        """Where the KV of each layer is. Printing it gives a table."""
        return residency(self._forward, self.layers)

    def explain(self) -> Explanation:
        """What is where and why; what steps were predicted to take and took; what binds them, and what would change it.

        Printed, it is a report. It measures nothing: where `kvtier.calibrate` did not, and steps have not shown a rate
        yet, it reckons with an estimate, and says so.
        """
        return explanation(self._forward, self.layers, self.stats)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging; walks every block."""
        self._forward.check_integrity()

    def __repr__(self) -> str:
        if self._forward.closed:
            return "TieredKVCache(closed)"
        return f"TieredKVCache({summary(self._forward, self.layers, self.stats)})"

    # Life

    @checks_names
    def resize(
        self, *, device_budget: Size | Mapping[str, Size] | None = None, host_budget: Size | None = None
    ) -> None:
        """Give the cache other budgets while it holds tokens. Blocks leave the device where its budget falls.

        Args:
            device_budget, host_budget: bytes, written as at construction; None: as it is.

        Raises:
            ConfigError: malformed; a device tier where there was none; or the cache is on a memory that others may use.
            BudgetError: what the cache holds does not fit; names the smallest that works. Nothing was changed.
        """
        self._check_ours()
        memory = self._forward.memory
        if not memory.private:
            raise ConfigError("The budgets are those of the TieredMemory that the cache was given: `memory.resize()`.")
        memory.resize(device_budget=device_budget, host_budget=host_budget)

    def close(self) -> None:
        """Give back what the cache holds, with its own memory all of that. The cache cannot be used afterwards.

        Warns, if no forward ever used it.
        """
        self._warn_if_unused("closed", 3)
        self._give_back()

    def _give_back(self) -> None:
        self._forward.close()
        lengthen_sdpa(self)

    def __enter__(self) -> TieredKVCache:
        self._forward.check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        if kind is None:
            self._warn_if_unused("closed", 3)
        self._give_back()

    def __del__(self) -> None:
        if not sys.is_finalizing() and "_was_used" in vars(self):  # else it was not made
            self._warn_if_unused("dropped", 2)

    def _warn_if_unused(self, how: str, stacklevel: int) -> None:
        forward = self._forward
        if self._was_used or not self._tells_unused or forward.closed or forward.counters.steps or forward.readers:
            return
        self._was_used = True  # once is enough
        if any(isinstance(x, CacheLayerMixin) and x.get_seq_length() for x in self.layers):
            return
        warnings.warn(
            f"A TieredKVCache was {how}, and no forward had used it. Pass it to the call itself, "
            f"`model.generate(..., {CACHE}=cache)`; where other code makes that call, put "
            "`with kvtier.tiered(model):` around it.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        memory = self._forward.memory
        return {
            "config": self._config,
            "options": self._options,
            "budgets": memory.options,
            "policy": memory.policy,
            **content_of(self._forward, self.layers),
            "parted": self._parted,
        }

    def __setstate__(self, state: dict[str, Any], memory: TieredMemory | None = None) -> None:
        """What is unpickled has a memory of its own, with the same budgets."""
        self._config, self._options = state["config"], state["options"]
        self._setup(TieredMemory.of_one_cache(state["budgets"], state["policy"]) if memory is None else memory)
        self._was_used = True  # who copies caches may copy more than are used
        self._parted = state.get("parted")
        if len(state["layers"]) > len(self.layers):
            self._add_layers(len(state["layers"]) - 1)
        fill(self._forward, self.layers, state)
        self._recurrent.watch(self.layers)

    def __copy__(self) -> TieredKVCache:
        """A whole copy: one that shares some layers, those of Transformers, would be changed by what changes this."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredKVCache:
        import copy

        state = self.__getstate__()
        # What was made for this copy is copied once, into blocks; only Transformers' own layers need copying here.
        state["layers"] = [x if x is None or isinstance(x, tuple) else copy.deepcopy(x, memo) for x in state["layers"]]
        clone = type(self).__new__(type(self))
        shared = None if self._forward.memory.private else self._forward.memory
        if shared is None:
            state["policy"] = copy.deepcopy(state["policy"], memo)
        try:
            clone.__setstate__(state, shared)
        except BaseException:
            if "_forward" in vars(clone):  # an error that somebody keeps would keep it in the memory
                clone._forward.close()
            raise
        memo[id(self)] = clone
        return clone
