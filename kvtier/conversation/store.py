"""`ConversationStore`: `generate` that begins where an earlier call left off, if that is the same beginning."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from kvtier.config import Size, parse_size
from kvtier.conversation.archive import Archive, Saved
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk import Disk
from kvtier.conversation.index import WIDTH, PrefixIndex, common, packed, unpacked
from kvtier.conversation.journal import GivenAgain, JournalledCache, note_forward
from kvtier.conversation.retention import Retention
from kvtier.conversation.reuse import RowReuse, StoreStats
from kvtier.conversation.states import States, copied, has_states, joined, nbytes
from kvtier.conversation.verify import difference
from kvtier.errors import (
    BudgetError,
    ClosedError,
    ConcurrentUseError,
    ConfigError,
    CorruptionError,
    KVTierError,
)
from kvtier.eviction.names import policy_of
from kvtier.eviction.policy import EvictionPolicy
from kvtier.hf import generation as of
from kvtier.hf.cache import TieredKVCache
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.loading import LoadOrCompute
from kvtier.planning.policy import Policy
from kvtier.tables.parked import ParkedSequence, ParkedSequences

T = TypeVar("T")

#: Tokens that are thought to fit, as long as the memory was never full.
_CAPACITY = 1 << 16
#: Tokens between two positions of a prompt at which states are copied.
SPACING = 512
#: Copies of states that one sequence keeps: the first, and the last ones.
MOST_STATES = 8


class _Entry:
    """A sequence that is kept.

    Attributes:
        key, ids: what it is of.
        sequence: its keys and values.
        states: for models that keep states, copies by position.
    """

    __slots__ = ("ids", "key", "sequence", "states")

    def __init__(self, key: Hashable, ids: bytes, sequence: ParkedSequence) -> None:
        self.key = key
        self.ids = ids
        self.sequence = sequence
        self.states: dict[int, States] = {}


class _At:
    """A copy of an entry's states at a position, as it is found.

    Attributes:
        entry: that has it.
        nbytes: of the copy.
    """

    __slots__ = ("entry", "nbytes")

    def __init__(self, entry: _Entry, nbytes: int) -> None:
        self.entry = entry
        self.nbytes = nbytes


@dataclass
class _Call:
    """A call of `generate` that may re-use.

    Attributes:
        ids, mask: of the prompt, `[rows, columns]`.
        pads: columns of padding of each row.
        rows: token ids of each row, packed.
        expand: rows of the cache for each row.
        key: see `PrefixIndex`.
        depends: what keys and values depend on besides tokens, when the call began.
        loaded: tokens of each row that were read from the disk for this call.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    pads: list[int]
    rows: list[bytes]
    expand: int
    key: Hashable
    depends: Hashable
    loaded: list[int] = field(default_factory=list)


def _bytes(name: str, size: Size) -> int:
    found = parse_size(name, size)
    if not isinstance(found, int):
        raise ConfigError(f"{name}={size!r}: give bytes, such as 10**12 or '500GiB'.")
    return found


def _weakly(method: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """A method of an object that it does not keep alive."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        found = weak()
        return otherwise if found is None else found(*args)

    return call


class ConversationStore:
    """Keeps the keys and values of what a model has read and written, for later calls that begin the same.

        store = kvtier.ConversationStore(model, host_budget="64GiB")
        out = store.generate(**inputs, max_new_tokens=64)  # as model.generate
        answer = store.open("alice").send("And in French?", tokenizer=tokenizer)

    A cache of Transformers never sees token ids, so that one that is used again gives wrong tokens when the history was
    edited. Here the ids that the model was given are kept with the keys and values, and each row of a call continues
    the longest beginning that it shares with any earlier one: a history that was extended, edited, shortened or
    generated again, from beams, several return sequences or a padded batch. The rest is computed. The tokens are those
    of `model.generate` with a new cache (to rounding: a prompt is computed in other portions).

    What is kept is shared block by block, and takes no room that a call needs: it goes first, the longest unused first,
    its end first. Layers with windows or recurrent states are copied at the ends of prompts and turns and every
    `SPACING` tokens of a prompt, and a call continues from the last copy that is still valid. The copies have a
    budget of their own.

    Args:
        model: of Transformers, a decoder. An encoder-decoder generates as ever, and re-uses nothing.
        memory: a `kvtier.TieredMemory` that others may use too; without it, one is made with these budgets.
        device_budget, host_budget, policy, audit: as for `TieredMemory`.
        block_size, host_attention: as for `TieredKVCache`.
        directory: where what is kept is saved in the background, for later processes with the same model: bound to
            every weight and the config. Without one, what is kept ends with the store.
        loading: "auto" reads from the disk what is expected to be there sooner than it is computed again, by what both
            took before; "always" all that is saved.
        disk_budget: bytes on the disk: an int or a string; what was used longest ago goes first. None: no limit.
        state_budget: bytes of all copies of states, an int or a string; what was used longest ago goes first. They are
            where the model is, and are not part of the other budgets.
        eviction: which of what is kept goes first where the memory is full: a `kvtier.EvictionPolicy`, or "lru",
            "arc", "s3-fifo", "lfu", "second-use", "pensieve"; None: "adaptive", which follows the best of some of them.

    Raises:
        ConfigError: an option that is malformed; a directory that cannot be used, or is of another model.
        StoreInUseError: the directory is open in another store or process.

    Any number of threads may call `generate` at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: TieredMemory | None = None,
        device_budget: Size | Mapping[str, Size] | None = None,
        host_budget: Size | None = None,
        policy: Policy | str | None = None,
        audit: Literal["off", "sampled", "full"] | None = None,
        block_size: int | str = "auto",
        host_attention: bool = True,
        directory: str | Path | None = None,
        disk_budget: Size | None = None,
        loading: Literal["auto", "always"] = "auto",
        state_budget: Size = "1GiB",
        eviction: EvictionPolicy | str | None = None,
    ) -> None:
        if not hasattr(model, "generate") or not hasattr(model, "config"):
            raise ConfigError(f"model is an object of {type(model).__name__}, not a Transformers model that generates.")
        self._own = memory is None
        if memory is None:
            budgets: dict[str, Any] = {"device_budget": device_budget, "policy": policy}
            budgets["audit"] = "sampled" if audit is None else audit
            memory = TieredMemory(**budgets, host_budget="auto" if host_budget is None else host_budget)
        elif (device_budget, host_budget, policy, audit) != (None, None, None, None):
            raise ConfigError(
                "The store is given a memory, and budgets, policy and audit are set there: TieredMemory(...)."
            )
        self.model = model
        self.memory = memory
        self._options: dict[str, Any] = {"block_size": block_size, "host_attention": host_attention}
        self._cache().close()  # options that are wrong are an error here
        self._retention: Retention[ParkedSequence] = Retention(policy_of(eviction), _CAPACITY)
        with memory.lock:
            self._parked = ParkedSequences(memory)
        self._parked.shortened = _weakly(self._shortened, None)
        self._parked.victims = _weakly(self._victims, [])
        # Who drops a store on a memory of others gives back what it held.
        self._finalizer = weakref.finalize(self, memory.abandon, self._parked.close)
        self._finalizer.atexit = False
        # Changed under the memory's lock: what is parked may go whenever somebody needs room.
        self._entries: dict[ParkedSequence, _Entry] = {}
        self._index: PrefixIndex[_Entry | _At] = PrefixIndex()
        self._at: dict[_Entry, dict[int, _At]] = {}
        self._weights = of.weights_version(model)
        self._go_on: bool | None = None
        self._constant = of.length_of_constant_positions(model.config)
        self._conversations: dict[str, Conversation] = {}
        self._problem = ""
        self._last = threading.local()
        self._calls = self._prompt_tokens = self._cached_tokens = self._dropped = 0
        self._active: set[object] = set()
        if loading not in ("auto", "always"):
            raise ConfigError(f"loading={loading!r}: give 'auto' or 'always'.")
        self._loading, self._loads_all = LoadOrCompute(), loading == "always"
        self._state_budget, self._state_bytes = _bytes("state_budget", state_budget), 0
        self._archive: Archive | None = None
        if directory is not None:
            limit = None if disk_budget is None else _bytes("disk_budget", disk_budget)
            disk = Disk(directory, limit, of.fingerprint(model))
            self._archive = Archive(disk, self._open_kept, self._new_layers, lambda: torch.device(model.device))
            for name, state in disk.conversations().items():
                self._conversations[name] = Conversation.of(self, name, state)
        elif disk_budget is not None:
            raise ConfigError("disk_budget is given without a directory.")
        self._keeps_positions = of.keeps_positions(model)
        self._reads_positions = of.reads_positions(model)
        self._hook = of.inner(model).register_forward_pre_hook(note_forward, with_kwargs=True)
        self.closed = False

    # Generate

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: Any = None, *, salt: Hashable = None, **kwargs: Any
    ) -> Any:
        """What `model.generate` gives for the same arguments; see the class.

        Args:
            inputs: token ids, `[rows, tokens]`; or `input_ids=`.
            generation_config: as `model.generate` takes it.
            salt: what is kept of a call is found by calls with an equal salt only, so that tenants share nothing.
            kwargs: as `model.generate` takes them, `past_key_values` and `cache_implementation` aside.

        Returns:
            As `model.generate`. Of a dict (`return_dict_in_generate=True`), `reuse` says what each row began with; so
            does `store.reuse` until this thread's next call.

        Raises:
            ConfigError: a cache was given. BudgetError and whatever `TieredKVCache` and `model.generate` raise; what
            was kept before is kept.
        """
        self._check_open()
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        try:
            hash(salt)
        except TypeError:
            raise ConfigError(
                f"salt={salt!r} cannot be compared: give a string, a number or a tuple of these."
            ) from None
        given = (
            of.setting("cache_implementation", self.model, kwargs) if hasattr(self.model, "generation_config") else None
        )
        for name, value in (("past_key_values", kwargs.get("past_key_values")), ("cache_implementation", given)):
            if value is not None:
                raise ConfigError(f"{name}: the store brings its own cache. Leave it out, or call model.generate.")
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        with self._in_use():
            self._check_weights()
            call, why = self._parse(ids, kwargs, salt)
            if call is None:
                return self._plain(ids, kwargs, why)
            return self._continue(call, kwargs)

    @property
    def reuse(self) -> tuple[RowReuse, ...]:
        """What each row of this thread's last call began with."""
        return getattr(self._last, "reuse", ())

    def _parse(self, ids: Any, kwargs: dict[str, Any], salt: Hashable) -> tuple[_Call | None, str]:
        """The call; or None, and why it re-uses nothing and is of no use to others."""
        model = self.model
        others = of.model_inputs(kwargs)
        if model.config.is_encoder_decoder:
            return None, "an encoder-decoder"
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
            return None, "no token ids"
        if others:
            return None, f"keys and values depend on {', '.join(others)} too"
        if of.setting("use_cache", model, kwargs) is False:
            return None, "use_cache=False"
        if self._keeps_positions:
            return None, "the model remembers positions from one call to the next"
        if model.training:
            return None, "the model is in training mode"
        if of.setting("prefill_chunk_size", model, kwargs):
            return None, "prefill_chunk_size"
        if not of.knows_length(model.config):
            return None, "no layer of the model counts tokens"
        mask = kwargs.pop("attention_mask", None)
        if mask is None:
            mask = self._default_mask(ids, kwargs)
        here = mask.to("cpu", torch.bool) if mask.dim() == 2 else torch.zeros(1, 0)
        if here.shape != ids.shape or not bool((here[:, 1:] >= here[:, :-1]).all()) or not bool(here[:, -1].all()):
            kwargs["attention_mask"] = mask
            return None, "a mask that is not that of left padding"
        expand = max(of.setting(name, model, kwargs) or 1 for name in ("num_beams", "num_return_sequences"))
        pads = (~here).sum(1).tolist()
        if any(pads) and not self._reads_positions:
            kwargs["attention_mask"] = mask
            return None, "positions of the model count the padding"
        rows = [packed(row[pad:]) for row, pad in zip(ids.tolist(), pads, strict=True)]
        key = (of.computed_as(model), salt)
        return _Call(ids, mask, pads, rows, expand, key, self._depends(), [0] * len(rows)), ""

    def _depends(self) -> Hashable:
        return of.computed_as(self.model), of.weights_version(self.model)

    def _default_mask(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The mask that `generate` infers: padding is what is a padding token and no end of a text."""
        pad, ends = (of.setting(name, self.model, kwargs) for name in ("pad_token_id", "eos_token_id"))
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        if isinstance(pad, int) and pad not in ends and bool((ids == pad).any()):
            return (ids != pad).long()
        return torch.ones_like(ids)

    def _plain(self, ids: Any, kwargs: dict[str, Any], why: str) -> Any:
        """A call that re-uses nothing."""
        rows = ids.shape[0] if isinstance(ids, torch.Tensor) and ids.dim() else 1
        tokens = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 0
        reuse = tuple(RowReuse(tokens, 0, tokens, why) for _ in range(rows))
        with contextlib.ExitStack() as stack:
            if not self.model.config.is_encoder_decoder and of.setting("use_cache", self.model, kwargs) is not False:
                cache = TieredKVCache(self.model.config, memory=self.memory, **self._options)
                kwargs["past_key_values"] = stack.enter_context(cache)
            return self._report(self.model.generate(ids, **kwargs), reuse)

    def _continue(self, call: _Call, kwargs: dict[str, Any]) -> Any:
        if of.assisted(self.model, kwargs):
            return self._run(call, kwargs, "assisted decoding begins with the whole prompt")
        try:
            return self._run(call, kwargs)
        except GivenAgain:
            return self._run(call, kwargs, "this way to generate begins with the whole prompt")

    def _run(self, call: _Call, kwargs: dict[str, Any], why: str = "") -> Any:
        """Generate, from what is there but where `why` says that nothing may be."""
        cache = self._cache()
        used: list[_Entry] = []
        try:
            stateful, whole = has_states(cache.layers), bool(why)
            cached = 0
            cache.begin(call.ids[:, :0].repeat_interleave(call.expand, 0))
            if not whole:
                cached, why = self._begin(cache, call, kwargs, stateful, used)
            states: dict[int, list[States]] = {}
            if stateful and not any(call.pads) and not whole:
                states = self._prefill(cache, call, cached)
            reuse = tuple(
                RowReuse(
                    len(row) // WIDTH,
                    max(cached - pad, 0),
                    len(row) // WIDTH - max(cached - pad, 0),
                    why,
                    min(loaded, max(cached - pad, 0)),
                )
                for row, pad, loaded in zip(call.rows, call.pads, call.loaded, strict=True)
            )
            cache.prompt = call.ids.shape[1] if cache.get_seq_length() else None
            try:
                out = self.model.generate(call.ids, attention_mask=call.mask, past_key_values=cache, **kwargs)
            except BaseException:
                # What is whole is kept: the next call continues it.
                with contextlib.suppress(KVTierError):
                    if not stateful:
                        cache.crop(0)
                        self._keep(cache, call, stateful, states)
                raise
            try:
                self._keep(cache, call, stateful, states)
            except KVTierError as error:
                self._problem = str(error)  # what was generated is not lost for it
            self._learn(cache, stateful)
            return self._report(out, reuse)
        except BaseException as error:
            self._drop_lost()
            if isinstance(error, CorruptionError):
                self._drop_corrupt(used)
            raise
        finally:
            try:
                cache.close()
            finally:
                with self.memory.lock:
                    for entry in used:
                        entry.sequence.users.discard(cache)
                        self._retention.release(entry.sequence)

    def _learn(self, cache: JournalledCache, stateful: bool) -> None:
        """Learn what a prefill takes. Where work goes on behind the CPU's back, what a forward takes is known if its
        token is chosen before the next one."""
        if self._archive is None or (stateful and torch.device(self.model.device).type != "cpu"):
            return
        with self.memory.lock:
            for i, each in enumerate(cache.took):
                if each.new > 1 or i == 1:  # of forwards of one token one is enough
                    self._loading.computed(each.new, each.past, each.rows, each.seconds)

    def _drop_lost(self) -> None:
        """Drop what was parked and is in no index, for its call was cut short; a call of another thread that is about
        to list what it has parked keeps nothing."""
        with self.memory.changing():
            for sequence in [x for x in self._parked.sequences if x not in self._entries]:
                self._parked.drop(sequence)

    def _drop_corrupt(self, suspects: Sequence[_Entry]) -> None:
        """Drop what holds blocks that were found to hold other bytes than were written, and what a call began with that
        found it so."""
        with self.memory.changing():
            for sequence in list(self._parked.sequences):
                if sequence.corrupt or any(sequence is entry.sequence for entry in suspects):
                    self._parked.drop(sequence)

    def _report(self, out: Any, reuse: tuple[RowReuse, ...]) -> Any:
        self._last.reuse = reuse
        with self.memory.lock:
            self._calls += 1
            self._prompt_tokens += sum(row.prompt for row in reuse)
            self._cached_tokens += sum(row.cached for row in reuse)
        if not isinstance(out, torch.Tensor):
            out.reuse = reuse
            if "past_key_values" in out:
                out.past_key_values = None  # it is closed: what it held is kept here
        return out

    # What a call begins with

    def _begin(
        self, cache: JournalledCache, call: _Call, kwargs: dict[str, Any], stateful: bool, used: list[_Entry]
    ) -> tuple[int, str]:
        """Let a cache begin with what is there of its rows: columns, the padding included; and why there are none."""
        if self._constant is not None and self._longest(call, kwargs) > self._constant:
            return 0, f"beyond {self._constant} tokens, positions depend on the length"
        if self._archive is not None:
            for number, row in enumerate(call.rows):
                call.loaded[number] = self._load(self._archive, call.key, row[:-WIDTH], stateful)
        with self.memory.lock:
            if self.memory.has_garbage:
                self.memory.collect()
            columns, entries = self._find_states(call) if stateful else self._find(call)
            used += entries
            for entry in entries:
                entry.sequence.users.add(cache)
                self._parked.touch(entry.sequence)
                self._retention.hold(entry.sequence)
            states = [entry.states[columns] for entry in entries] if stateful and columns else []
        if not columns:
            return 0, "nothing that is kept begins the same"
        rows = [entry.sequence for entry in entries for _ in range(call.expand)]
        try:
            if any(call.pads):
                got = self._copy_rows(cache, call, entries, columns)
            else:
                got = cache._forward.follow(self._parked, rows, columns)
        except BudgetError:
            cache.reset()
            return 0, "no room for what is kept and the rest of the call"
        except CorruptionError as error:
            self._problem = str(error)
            cache.reset()
            self._drop_corrupt(entries)
            return 0, "what was kept does not hold what was written"
        if not got or (stateful and got != columns):
            cache.reset()
            return 0, "what was kept was dropped meanwhile"
        if stateful:
            for i, layer in joined([state for state in states for _ in range(call.expand)]).items():
                cache.layers[i] = layer
            cache._recurrent.watch(cache.layers)
        with self.memory.lock:
            for tokens in {got - pad for pad in call.pads}:
                alike = [x.sequence for x, pad in zip(entries, call.pads, strict=True) if got - pad == tokens]
                self._retention.use(alike, tokens)
        cache.begin(call.ids[:, :got].repeat_interleave(call.expand, 0))
        return got, ""

    def _longest(self, call: _Call, kwargs: dict[str, Any]) -> int:
        """Tokens that a row may come to."""
        most = of.setting("max_new_tokens", self.model, kwargs)
        if most is not None:
            return int(call.ids.shape[1] + most)
        return max(of.setting("max_length", self.model, kwargs) or 0, call.ids.shape[1] + 1)

    def _find(self, call: _Call) -> tuple[int, list[_Entry]]:
        """Columns that are there of every row, and what has them."""
        entries, columns = [], call.ids.shape[1] - 1  # the last token's logits are wanted
        for row, pad in zip(call.rows, call.pads, strict=True):
            _, found = self._index.find(call.key, row)
            if not isinstance(found, _Entry):
                return 0, []
            length = common(found.ids, row)
            columns = min(columns, length + pad, found.sequence.length + pad)
            entries.append(found)
        return (columns, entries) if columns > max(call.pads) else (0, [])

    def _find_states(self, call: _Call) -> tuple[int, list[_Entry]]:
        """The same where layers keep states: all rows continue at one position, of which each has a copy."""
        if any(call.pads):
            return 0, []
        common_to: dict[int, list[_Entry]] | None = None
        for row in call.rows:
            mine: dict[int, _Entry] = {}
            for length, found in self._index.prefixes(call.key, row[:-WIDTH]):
                if isinstance(found, _At) and min(found.entry.sequence.length, common(found.entry.ids, row)) >= length:
                    mine.setdefault(length, found.entry)
            before = common_to
            common_to = {
                n: [*(before[n] if before is not None else []), x]
                for n, x in mine.items()
                if before is None or n in before
            }
        columns = max(common_to or {}, default=0)
        return (columns, common_to[columns]) if columns and common_to else (0, [])

    def _copy_rows(self, cache: JournalledCache, call: _Call, entries: Sequence[_Entry], columns: int) -> int:
        """Copy what is there of the rows of a padded batch, layer by layer: their columns are not those of blocks."""
        sources = []
        with contextlib.ExitStack() as stack:
            for entry, pad in zip(entries, call.pads, strict=True):
                source = stack.enter_context(self._cache())
                if source._forward.follow(self._parked, [entry.sequence], columns - pad) < columns - pad:
                    return 0
                sources.append(source)
            for i in sorted(sources[0]._forward.readers):
                parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
                for source, pad in zip(sources, call.pads, strict=True):
                    pair = source.layers[i].dense("padded batch")
                    for part, x in zip(parts, pair, strict=True):
                        part.append(torch.nn.functional.pad(x, (0, 0, pad, 0)))
                keys, values = (torch.cat(part).repeat_interleave(call.expand, 0) for part in parts)
                cache._forward.restore(i, keys, values)
        cache._forward.steps.end()
        return columns

    def _prefill(self, cache: JournalledCache, call: _Call, cached: int) -> dict[int, list[States]]:
        """Compute the prompt but for its last token, and copy states on the way: by position, those of each row."""
        if self._go_on is None:
            self._go_on = of.states_go_on(of.inner(self.model))
        model, ids = of.inner(self.model), call.ids.repeat_interleave(call.expand, 0)
        last, found = ids.shape[1] - 1, dict[int, list[States]]()
        options = {"logits_to_keep": 1} if of.takes_logits_to_keep(model) else {}
        mask = call.mask.repeat_interleave(call.expand, 0)
        while cached < last:
            stop = min(last, (cached // SPACING + 1) * SPACING)
            if cached and not self._go_on:
                stop = cached + 1
            with torch.no_grad():
                model(
                    input_ids=ids[:, cached:stop],
                    attention_mask=mask[:, :stop],
                    past_key_values=cache,
                    use_cache=True,
                    **options,
                )
            cached = stop
            if stop == last or stop % SPACING == 0:
                found[stop] = [copied(cache.layers, row * call.expand) for row in range(len(call.rows))]
                for extra in list(found)[1 : max(len(found) - MOST_STATES + 1, 1)]:
                    del found[extra]
        return found

    # What is kept of a call

    def _keep(self, cache: JournalledCache, call: _Call, stateful: bool, states: dict[int, list[States]]) -> None:
        """Keep what a cache holds."""
        length = cache.get_seq_length()
        if cache.unknown or cache.ids.shape[1] < length or not length:
            return
        if stateful and any(call.pads):
            return  # the padding is part of a state
        if self._constant is not None and length > self._constant:
            return  # keys of a longer sequence are others than those of a shorter one
        if call.depends != self._depends():
            return  # the model was changed meanwhile
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            return  # assisted decoding: windows hold more than they show
        pad_token = of.setting("pad_token_id", self.model, {})
        for row, ids in enumerate(cache.ids[:, :length].tolist()):
            source = row * len(call.rows) // len(cache.ids)
            pad = call.pads[source]
            mine = ids[pad:]
            while not stateful and len(mine) > 1 and mine[-1] == mine[-2] == pad_token:
                mine.pop()  # what a row that has ended was fed
            at = {n: x[source] for n, x in states.items() if n <= len(mine)}
            if stateful:
                at[len(mine)] = copied(cache.layers, row)
            if mine:
                self._keep_row(cache, call.key, row, pad, packed(mine), at)

    def _keep_row(
        self,
        cache: JournalledCache,
        key: Hashable,
        row: int,
        pad: int,
        ids: bytes,
        states: dict[int, States],
        save: bool = True,
    ) -> None:
        with self.memory.lock:
            _, found = self._index.find(key, ids)
            entry = found.entry if isinstance(found, _At) else found
            if entry is not None and min(common(entry.ids, ids), entry.sequence.length) == len(ids) // WIDTH:
                self._parked.touch(entry.sequence)
                self._add_states(entry, states)
                if save and entry.sequence.length:
                    self._save(entry)
                return
        length = len(ids) // WIDTH
        try:
            if pad:
                with self._cache() as plain:
                    for i in sorted(cache._forward.readers):
                        keys, values = cache.layers[i].dense("padded batch")
                        stop = pad + length
                        plain._forward.restore(i, keys[row : row + 1, :, pad:stop], values[row : row + 1, :, pad:stop])
                    plain._forward.steps.end()
                    sequence = plain._forward.park(self._parked, 0, length)
            else:
                sequence = cache._forward.park(self._parked, row, length)
        except BudgetError:
            return  # no room for a copy: nothing is lost but the time to compute it again
        with self.memory.lock:
            entry = _Entry(key, ids[: sequence.length * WIDTH], sequence)
            if sequence.length:
                # Before older ones go: what both have stays known.
                self._retention.keep(sequence, key, entry.ids)
            for old in [x.entry if isinstance(x, _At) else x for _, x in self._index.prefixes(key, ids)]:
                if len(old.ids) <= len(ids) and old.ids == ids[: len(old.ids)] and old in self._at:
                    states = {**old.states, **states}
                    self._forget(old)
                    self._parked.drop(old.sequence)
            self._entries[sequence] = entry
            self._at[entry] = {}
            if not sequence.length:  # gone already
                self._forget(entry)
                return
            self._add_states(entry, states)
            if not states:
                self._index.add(key, entry.ids, entry)
            elif not entry.states:  # it gave up its end meanwhile, and nobody could continue the rest
                self._parked.drop(sequence)
                return
            if save:
                self._save(entry)

    def _add_states(self, entry: _Entry, states: dict[int, States]) -> None:
        for length, each in states.items():
            if length <= entry.sequence.length and length not in entry.states:
                entry.states[length] = each
                self._at[entry][length] = at = _At(entry, nbytes(each))
                self._state_bytes += at.nbytes
                self._index.add(entry.key, entry.ids[: length * WIDTH], at)
        for length in sorted(entry.states)[1 : max(len(entry.states) - MOST_STATES + 1, 1)]:
            self._drop_states(entry, length)
        if states:
            self._bound_states(entry)

    def _bound_states(self, newest: _Entry) -> None:
        """Drop what was used longest ago until the copies of states are within their budget; the newest goes last."""
        for sequence in list(self._parked.sequences):
            if self._state_bytes <= self._state_budget:
                return
            entry = self._entries.get(sequence)
            if entry is not None and entry is not newest and entry.states:
                self._parked.drop(sequence)  # a call that continues it has copied its states
        for length in sorted(newest.states):
            if self._state_bytes > self._state_budget:
                self._drop_states(newest, length)
        if not newest.states:
            self._parked.drop(newest.sequence)

    def _drop_states(self, entry: _Entry, length: int) -> None:
        del entry.states[length]
        at = self._at[entry].pop(length)
        self._state_bytes -= at.nbytes
        self._index.remove(at)

    def _forget(self, entry: _Entry) -> None:
        for length in list(entry.states):
            self._drop_states(entry, length)
        self._index.remove(entry)
        self._entries.pop(entry.sequence, None)
        self._at.pop(entry, None)

    def _shortened(self, sequence: ParkedSequence) -> None:
        """A sequence has given up its end, or all of it. The memory's lock is held."""
        self._retention.shortened(sequence, sequence.length)
        entry = self._entries.get(sequence)
        if entry is None:
            return
        self._dropped += 1
        stateful = bool(entry.states)
        for length in [n for n in entry.states if n > sequence.length]:
            self._drop_states(entry, length)
        if stateful and sequence.length > (useful := max(entry.states, default=0)):
            self._parked.shorten(sequence, useful)  # nobody can continue behind the last copy
        elif not sequence.length:
            self._forget(entry)
        elif entry in self._index:
            entry.ids = entry.ids[: sequence.length * WIDTH]
            self._index.add(entry.key, entry.ids, entry)

    def _victims(self) -> list[tuple[ParkedSequence, int]]:
        """What gives up room next; see `ParkedSequences.victims`. The memory's lock is held."""
        self._retention.full()
        return self._retention.evict()

    # The disk

    @staticmethod
    def _disk_key(key: Hashable) -> str | None:
        """The key on the disk; None: what is under it is not saved."""
        salt: Any = key[1]  # type: ignore[index]
        return repr(key) if salt is None or type(salt) in (str, int, bytes) else None

    def _load(self, archive: Archive, key: Hashable, ids: bytes, stateful: bool) -> int:
        """Read from the disk what is longer there than here, unless it is expected to be computed sooner. Tokens that
        were read."""
        name, prompt = self._disk_key(key), len(ids) // WIDTH + 1
        if name is None:
            return 0
        length, chunk = archive.find(name, ids, stateful=stateful)
        with self.memory.lock:
            if stateful:
                here = max((n for n, x in self._index.prefixes(key, ids) if isinstance(x, _At)), default=0)
            else:
                here, _ = self._index.find(key, ids)
        if chunk is None or length <= here:
            return 0
        nbytes = sum(x.nbytes for x in chunk.chain())
        with self.memory.lock:
            if not (self._loads_all or self._loading.loads(nbytes, length - here, here, prompt - length)):
                return 0
        began = time.perf_counter()
        with self._cache() as cache:
            try:
                got, states = archive.load(cache, chunk, length, stateful=stateful)
            except BudgetError as error:
                archive.disk.problem = str(error)
                return 0
            if not got:
                return 0
            self._keep_row(
                cache, key, 0, 0, ids[: got * WIDTH], {got: states} if states is not None else {}, save=False
            )
            with self.memory.lock:
                self._loading.loaded(nbytes, time.perf_counter() - began)
        return got

    def _save(self, entry: _Entry) -> None:
        """Save an entry soon. The memory's lock is held."""
        name = self._disk_key(entry.key)
        if self._archive is not None and name is not None and not self._archive.disk.closed:
            length = entry.sequence.length
            self._archive.submit(Saved(name, entry.ids[: length * WIDTH], entry.states.get(length), entry.key))

    def _open_kept(self, saved: Saved) -> JournalledCache | None:
        """A cache with a sequence that is to be saved, if it is kept still."""
        length = len(saved.ids) // WIDTH
        with self.memory.lock:
            got, found = self._index.find(saved.place, saved.ids)
            if self._archive is None or self._archive.stopped:
                return None
            entry = found.entry if isinstance(found, _At) else found
            if entry is None or got < length or entry.sequence.length < length:
                return None
            sequence = entry.sequence
        cache = self._cache()
        try:
            if cache._forward.follow(self._parked, [sequence], length) == length:
                return cache
        except BaseException:
            cache.close()
            raise
        cache.close()
        return None

    def _new_layers(self) -> list[Any]:
        with self._cache() as cache:
            return list(cache.layers)

    def flush(self) -> None:
        """Return when all that is kept is saved, or cannot be; `stats.problem` says why."""
        self._check_open()
        if self._archive is not None:
            for name, chat in list(self._conversations.items()):
                self._archive.disk.save_conversation(name, chat.state())
            self._archive.flush()

    # Conversations

    def open(self, name: str, *, salt: Hashable = None, new: bool = False) -> Conversation:
        """The conversation of a name, made where there is none.

        Args:
            salt: of its calls; see `generate`.
            new: there must be none.

        Raises:
            ConfigError: no name, or one that is taken where `new`; or the conversation has another salt.
        """
        self._check_open()
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name={name!r}: a conversation has a name, a string that is not empty.")
        with self.memory.lock:
            found = self._conversations.get(name)
            if found is not None and new:
                raise ConfigError(f"There is a conversation {name!r} already.")
            if found is not None and found.salt != salt:
                raise ConfigError(f"Conversation {name!r} has another salt.")
            if found is None:
                found = self._conversations[name] = Conversation(self, name, salt)
            return found

    def forget(self, name: str) -> None:
        """Forget the name of a conversation; see `Conversation.close`."""
        with self.memory.lock:
            found = self._conversations.pop(name, None)
        if found is not None:
            found.closed = True
            if self._archive is not None:
                self._archive.disk.drop_conversation(name)

    def changed(self, chat: Conversation) -> None:
        """A conversation went on: save what it is."""
        if self._archive is not None and not self.closed and chat.saved:
            self._archive.disk.save_conversation(chat.name, chat.state())

    @property
    def names(self) -> list[str]:
        """Of all conversations."""
        with self.memory.lock:
            return list(self._conversations)

    def park(self, ids: Sequence[int], *, salt: Hashable = None) -> None:
        """Let what is kept of these tokens leave the device, as far as the host has room."""
        self._check_open()
        key, wanted = (of.computed_as(self.model), salt), packed(ids)
        with self.memory.changing(), contextlib.suppress(BudgetError):
            self.memory.collect()
            length, found = self._index.find(key, wanted)
            entry = found.entry if isinstance(found, _At) else found
            if entry is not None and length:
                self._parked.leave(entry.sequence)

    # Life

    def _cache(self) -> JournalledCache:
        return JournalledCache(self.model.config, memory=self.memory, **self._options)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        call = object()
        try:
            with self.memory.lock:
                self._check_open()
                self._active.add(call)
            yield
        finally:
            with self.memory.lock:
                self._active.discard(call)

    def _check_weights(self) -> None:
        """Drop everything if the model was changed: other weights make other keys and values. What is saved is of the
        weights that there were when the folder was opened: it is left alone from now on."""
        now = of.weights_version(self.model)
        if now != self._weights:
            if self._archive is not None:
                self._archive.stopped = True
                self._problem = "the model was changed since the folder was opened: nothing is saved or loaded any more"
            self.clear()
            self._weights = now

    def verify(self, sequences: int = 1) -> int:
        """Compute some sequences that are kept again, chosen at random, and compare their keys and values.

        What layers with windows or recurrent states keep is not compared.

        Args:
            sequences: how many, at the most.

        Returns:
            The tokens that were compared.

        Raises:
            CorruptionError: they differ by more than rounding. That sequence is not kept any more.
        """
        self._check_open()
        compared = 0
        with self._in_use():
            self._check_weights()
            with self.memory.lock:
                now = of.computed_as(self.model)
                entries = [x for x in self._entries.values() if x.key[0] == now]  # type: ignore[index]
            for entry in random.sample(entries, min(sequences, len(entries))):
                compared += self._verify(entry)
        return compared

    def _verify(self, entry: _Entry) -> int:
        with self._cache() as cache:
            try:
                length = cache._forward.follow(self._parked, [entry.sequence], 1 << 60)
                kept = {i: cache.layers[i].dense("verify") for i in cache._forward.readers}
                ids = torch.tensor([unpacked(entry.ids)[:length]], device=self.model.device)
                if not length or not kept:
                    return 0
                found = difference(kept, of.recomputed(self.model, ids, kept))
                if found:
                    raise CorruptionError(
                        f"Of a sequence of {length} tokens, {found}, when they are computed again. It is not kept any "
                        "more."
                    )
            except CorruptionError as error:
                self._problem = str(error)
                self._drop_corrupt([entry])
                raise
        return length

    def clear(self) -> None:
        """Drop all that is kept."""
        self._check_open()
        with self.memory.changing():
            self.memory.collect()
            self._parked.clear()

    @property
    def stats(self) -> StoreStats:
        """What is kept and what that was good for, now."""
        disk = None if self._archive is None else self._archive.disk
        with self.memory.lock:
            return StoreStats(
                self._calls,
                self._prompt_tokens,
                self._cached_tokens,
                len(self._entries),
                sum(x.sequence.length for x in self._entries.values()),
                self._state_bytes,
                self._dropped,
                *((0, 0) if disk is None else (disk.nbytes, disk.damaged)),
                self._problem or ("" if disk is None else disk.problem),
            )

    def close(self) -> None:
        """Drop all that is kept and leave the model as it was. Idempotent.

        Raises:
            ConcurrentUseError: another thread is generating.
        """
        if self.closed:
            if self._own and not self.memory.closed:
                self.memory.close()
            return
        if not self._active:
            self.flush()
        with self.memory.changing():
            if self._active:
                raise ConcurrentUseError("Another thread is generating with this ConversationStore. Wait for its end.")
            self.memory.collect()
            self._hook.remove()
            self._parked.close()
            self.closed = True
            self._finalizer.detach()
        if self._archive is not None:
            self._archive.close()
        if self._own:
            self.memory.close()

    def __enter__(self) -> ConversationStore:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This ConversationStore was closed. Make a new one.")

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept, found and counted agrees. For tests and debugging."""
        self.memory.check_integrity()
        with self.memory.lock:
            self._parked.check_integrity()
            self._retention.check_integrity(self._entries)
            assert self._entries.keys() == self._parked.sequences.keys(), "a sequence without ids"
            assert self._at.keys() == set(self._entries.values())
            for sequence, entry in self._entries.items():
                assert max(entry.states, default=0) <= sequence.length, "states of tokens that are gone"
                if not entry.states:
                    assert len(entry.ids) == sequence.length * WIDTH, "ids of tokens that are gone"
                    assert entry in self._index, "a sequence that nobody finds"
                for length, at in self._at[entry].items():
                    assert at in self._index
                    assert length in entry.states
