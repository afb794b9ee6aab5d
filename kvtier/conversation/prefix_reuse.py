"""`PrefixReuse`: one call of `generate`, from the longest beginning that is kept; what it computes is kept in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.conversation.call import Call, Calls
from kvtier.conversation.disk_tier import DiskTier
from kvtier.conversation.index import WIDTH, packed
from kvtier.conversation.journal import GivenAgain, JournalledCache, Took
from kvtier.conversation.kept import MOST_STATES, Entry, Kept
from kvtier.conversation.reuse import RowReuse
from kvtier.conversation.states import States, copied, has_states, joined
from kvtier.errors import BudgetError, CorruptionError, KVTierError
from kvtier.hf import generation as of
from kvtier.memory.tiered import TieredMemory

#: Tokens between two positions of a prompt at which states are copied.
SPACING = 512


class PrefixReuse:
    """Generates with a model from what is kept.

    Args:
        model: of Transformers, a decoder.
        calls: reads its calls.
        memory, kept, new_cache: of the store.
        disk_tier: of the store, if it has one.

    Attributes:
        problem: what went wrong last that no call raised.
    """

    def __init__(
        self,
        model: Any,
        calls: Calls,
        memory: TieredMemory,
        kept: Kept,
        new_cache: Callable[[], JournalledCache],
        disk_tier: DiskTier | None,
    ) -> None:
        self.problem = ""
        self._model = model
        self._calls = calls
        self._memory = memory
        self._kept = kept
        self._new_cache = new_cache
        self._disk_tier = disk_tier
        self._go_on: bool | None = None

    def generate(self, call: Call, kwargs: dict[str, Any]) -> tuple[Any, tuple[RowReuse, ...]]:
        """What `model.generate` gives, and what each row began with."""
        if of.assisted(self._model, kwargs):
            call.why = "assisted decoding begins with the whole prompt"
            return self._generate(call, kwargs)
        try:
            return self._generate(call, kwargs)
        except GivenAgain:
            call.why = "this way to generate begins with the whole prompt"
        except BudgetError:
            # To read what was there takes room too, that a prompt which is computed whole does not need.
            if not call.refused:
                raise
            call.why = "no room for what is kept and the rest of the call"
        return self._generate(call, kwargs)

    def _generate(self, call: Call, kwargs: dict[str, Any]) -> tuple[Any, tuple[RowReuse, ...]]:
        """Generate, from what is there but where `call.why` says that nothing may be."""
        cache = self._new_cache()
        used: list[Entry] = []
        stateful, whole, cached = has_states(cache.layers), bool(call.why), 0
        try:
            cache.begin(call.ids[:, :0].repeat_interleave(call.expand, 0))
            cached = 0 if whole else self._begin(cache, call, stateful, used)
            reuse, states = call.reuse(cached), dict[int, list[States]]()
            try:
                if stateful and not any(call.pads) and not whole:
                    states = self._prefill(cache, call, cached)
                cache.prompt = call.ids.shape[1] if cache.get_seq_length() else None
                out = self._model.generate(call.ids, attention_mask=call.mask, past_key_values=cache, **kwargs)
            except BaseException:
                # What is whole is kept: the next call continues it.
                with contextlib.suppress(KVTierError):
                    if not stateful:
                        cache.crop(0)
                        self._keep(cache, call, stateful, states)
                raise
            try:
                self._keep(cache, call, stateful, states, call.name)
            except KVTierError as error:
                self.problem = str(error)  # what was generated is not lost for it
            self._learn(cache, stateful)
            return out, reuse
        except BaseException as error:
            if isinstance(error, BudgetError) and (cached or (stateful and not whole)):
                with contextlib.suppress(KVTierError):
                    call.refused = cache.get_seq_length() < call.ids.shape[1]
            with self._memory.changing():
                self._kept.drop_lost()
                if isinstance(error, CorruptionError):
                    self._kept.drop_corrupt(used)
            raise
        finally:
            try:
                if call.tail is not None:
                    call.tail.end()
                cache.close()
            finally:
                with self._memory.lock:
                    self._kept.release(used, cache)

    # Begin

    def _begin(self, cache: JournalledCache, call: Call, stateful: bool, used: list[Entry]) -> int:
        """Let a cache begin with what is there of its rows: columns, the padding included. `call.why` says why there
        are none."""
        constant = self._calls.constant
        if constant is not None and call.longest > constant:
            call.why = f"beyond {constant} tokens, positions depend on the length"
            return 0
        not_loaded = self._load(cache, call, stateful)
        with self._memory.lock:
            if self._memory.has_garbage:
                self._memory.collect()
            columns, entries = self._kept.columns_with_states(call) if stateful else self._kept.columns_of(call)
            used += entries
            self._kept.hold(entries, cache)
            states = [entry.states[columns] for entry in entries] if stateful and columns else []
        if not columns:
            got = 0 if stateful else self._go_on_behind(cache, call, 0, used)
            if not got:
                call.why = call.why or not_loaded or "nothing that is kept begins the same"
            return got
        rows = [entry.sequence for entry in entries for _ in range(call.expand)]
        try:
            if any(call.pads):
                got = self._copy_rows(cache, call, entries, columns)
            else:
                got = cache._forward.follow(self._kept.parked, rows, columns)
        except BudgetError:
            cache.reset()
            call.why = "no room for what is kept and the rest of the call"
            return 0
        except CorruptionError as error:
            self.problem = str(error)
            cache.reset()
            with self._memory.changing():
                self._kept.drop_corrupt(entries)
            call.why = "what was kept does not hold what was written"
            return 0
        if not got or (stateful and got != columns):
            cache.reset()
            call.why = "what was kept was dropped meanwhile"
            return 0
        if stateful:
            for i, layer in joined([state for state in states for _ in range(call.expand)]).items():
                cache.layers[i] = layer
            cache._recurrent.watch(cache.layers)
        with self._memory.lock:
            self._kept.use(entries, [got - pad for pad in call.pads])
        cache.begin(call.ids[:, :got].repeat_interleave(call.expand, 0))
        if not stateful and got == columns:
            got = self._go_on_behind(cache, call, got, used)
        return got

    def _go_on_behind(self, cache: JournalledCache, call: Call, columns: int, used: list[Entry]) -> int:
        """Go on from the columns that are there with what is kept further on, and with what is loaded while the columns
        before it are computed. Columns that are there then."""
        columns = self._fill(cache, call, columns, used)
        if call.tail is None or self._disk_tier is None or columns >= call.tail.start:
            return columns
        call.tail.begin()
        began, start = time.perf_counter(), call.tail.start
        try:
            self._forward(cache, call, columns, start)
        except BudgetError:
            cache.crop(0)  # what a forward did not finish
            return columns
        of.synchronize(self._model)
        if call.expand == 1:
            self._disk_tier.learn_beside(Took(start - columns, columns, 1, time.perf_counter() - began))
        call.filled += start - columns
        call.loaded[0], why = call.tail.wait()
        columns = self._fill(cache, call, start, used)
        if columns == call.filled:
            call.why = call.why or why
        return columns

    def _fill(self, cache: JournalledCache, call: Call, columns: int, used: list[Entry]) -> int:
        """Compute what is missing before tokens that are kept further on, and go on with these, gap by gap. Columns
        that are there then.

        Pensieve (section 4.3) does it within the prefill, by a kernel; a forward for each gap computes no more tokens
        than that, and needs nothing of a model.
        """
        while True:
            with self._memory.lock:
                tokens, entry = self._kept.behind(call, columns)
                if entry is None:
                    return columns
                used.append(entry)
                self._kept.hold([entry], cache)
                start = entry.sequence.start
            got = 0
            try:
                if start > columns:
                    self._forward(cache, call, columns, start)
                    call.filled += start - columns
                elif start < columns:
                    cache.crop(start - columns)  # it has these tokens too
                columns = start
            except BudgetError:
                cache.crop(0)  # what the forward did not finish
            else:
                got = self._follow_on(cache, entry, tokens)
            if not got:
                if columns == call.filled:
                    call.why = "what was kept behind a gap was dropped meanwhile, or there is no room for it"
                return columns
            with self._memory.lock:
                self._kept.use([entry], [got])
            columns += got
            cache.begin(call.ids[:, :columns].repeat_interleave(call.expand, 0))

    def _follow_on(self, cache: JournalledCache, entry: Entry, tokens: int) -> int:
        """Go on with what is kept from where a cache ends. The tokens that are there of it; 0: none is."""
        try:
            return cache._forward.follow_on(self._kept.parked, entry.sequence, tokens)
        except BudgetError:
            return 0
        except CorruptionError as error:
            self.problem = str(error)
            with self._memory.changing():
                self._kept.drop_corrupt([entry])
            return 0

    def _load(self, cache: JournalledCache, call: Call, stateful: bool) -> str:
        """Load what is saved of the rows. Why some of it was not."""
        why = ""
        if self._disk_tier is not None and len(call.rows) == 1 and not stateful and not any(call.pads):
            step = cache._forward.options.whole_blocks
            call.loaded[0], why, call.tail = self._disk_tier.load_some(call.key, call.rows[0][:-WIDTH], step)
        elif self._disk_tier is not None:
            for number, row in enumerate(call.rows):
                call.loaded[number], found = self._disk_tier.load(call.key, row[:-WIDTH], stateful=stateful)
                why = why or found
        return why

    def _copy_rows(self, cache: JournalledCache, call: Call, entries: Sequence[Entry], columns: int) -> int:
        """Copy what is there of the rows of a padded batch, layer by layer: their columns are not those of blocks."""
        sources = []
        with contextlib.ExitStack() as stack:
            for entry, pad in zip(entries, call.pads, strict=True):
                source = stack.enter_context(self._new_cache())
                if source._forward.follow(self._kept.parked, [entry.sequence], columns - pad) < columns - pad:
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

    # Compute

    def _prefill(self, cache: JournalledCache, call: Call, cached: int) -> dict[int, list[States]]:
        """Compute the prompt but for its last token, and copy states on the way: by position, those of each row."""
        if self._go_on is None:
            self._go_on = of.states_go_on(of.inner(self._model))
        last, found = call.ids.shape[1] - 1, dict[int, list[States]]()
        while cached < last:
            stop = min(last, (cached // SPACING + 1) * SPACING)
            if cached and not self._go_on:
                stop = cached + 1
            self._forward(cache, call, cached, stop)
            cached = stop
            if stop == last or stop % SPACING == 0:
                found[stop] = [copied(cache.layers, row * call.expand) for row in range(len(call.rows))]
                for extra in list(found)[1 : max(len(found) - MOST_STATES + 1, 1)]:
                    del found[extra]
        return found

    def _forward(self, cache: JournalledCache, call: Call, start: int, stop: int) -> None:
        """Compute these columns of a prompt, behind those that a cache holds."""
        model = of.inner(self._model)
        with torch.no_grad():
            model(
                input_ids=call.ids[:, start:stop].repeat_interleave(call.expand, 0),
                attention_mask=call.mask[:, :stop].repeat_interleave(call.expand, 0),
                past_key_values=cache,
                use_cache=True,
                **({"logits_to_keep": 1} if of.takes_logits_to_keep(model) else {}),
            )

    def _learn(self, cache: JournalledCache, stateful: bool) -> None:
        """Learn what a prefill takes. Where work goes on behind the CPU's back, what a forward takes is known if its
        token is chosen before the next one."""
        if self._disk_tier is not None and (not stateful or torch.device(self._model.device).type == "cpu"):
            self._disk_tier.learn(cache.took)

    # Keep

    def _keep(
        self,
        cache: JournalledCache,
        call: Call,
        stateful: bool,
        states: dict[int, list[States]],
        name: str | None = None,
    ) -> None:
        """Keep what a cache holds; as the history of a conversation, where it has one row and there is a name."""
        length, constant = cache.get_seq_length(), self._calls.constant
        if cache.unknown or cache.ids.shape[1] < length or not length:
            return
        if stateful and any(call.pads):
            return  # the padding is part of a state
        if constant is not None and length > constant:
            return  # keys of a longer sequence are others than those of a shorter one
        if call.depends != self._calls.depends():
            return  # the model was changed meanwhile
        if any(getattr(layer, "record_past", False) for layer in cache.layers):
            return  # assisted decoding: windows hold more than they show
        pad_token = of.setting("pad_token_id", self._model, {})
        for row, ids in enumerate(cache.ids[:, :length].tolist()):
            source = row * len(call.rows) // len(cache.ids)
            pad = call.pads[source]
            mine = ids[pad:]
            while not stateful and len(mine) > 1 and mine[-1] == mine[-2] == pad_token:
                mine.pop()  # what a row that has ended was fed
            at = {n: x[source] for n, x in states.items() if n <= len(mine)}
            if stateful:
                at[len(mine)] = copied(cache.layers, row)
            named = name if len(cache.ids) == 1 else None
            entry = self._kept.keep(cache, call.key, row, pad, packed(mine), at, named) if mine else None
            if entry is not None and self._disk_tier is not None:
                self._disk_tier.save(entry)
