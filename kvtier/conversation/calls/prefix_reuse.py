"""`PrefixReuse`: one call of `generate`, from the longest beginning that is kept; what it computes is kept in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.conversation.calls.call import Call, Calls
from kvtier.conversation.calls.columns import Columns
from kvtier.conversation.calls.reuse import RowReuse
from kvtier.conversation.index import WIDTH, packed
from kvtier.conversation.journal import GivenOthers, JournalledCache, Took
from kvtier.conversation.kept.kept import MOST_STATES, SPACING, Entry, Kept
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.conversation.saved.tail import Tail
from kvtier.conversation.states import States, copied, has_states, joined
from kvtier.errors import BudgetError, CorruptionError, KVTierError, UnsupportedError
from kvtier.hf.models import generation as of
from kvtier.hf.models import trials
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.names import CACHE
from kvtier.memory.tiered import TieredMemory

#: Times that a call looks for what is kept, where what it finds is damaged, or goes before it is continued.
_TRIES = 3
#: What keeping may fail with; where the device has no memory, torch raises a RuntimeError.
_NOT_KEPT = (KVTierError, MemoryError, RuntimeError)
_NO_ROOM = "no room for what is kept and the rest of the call"
_IN_ITSELF = "the model keeps states in itself"
_PADDED = "the padding is part of the states that layers keep"
_SHARDED = "the weights are sharded: every process has to compute the same number of forwards"


class _Run:
    """A call, and the cache that computes it.

    Attributes:
        stateful: whether layers of the model keep states.
        used: entries that it holds, or is about to.
        cached: columns that it began with.
        prefilled: whether the store computes its prompt.
    """

    def __init__(self, call: Call, cache: JournalledCache) -> None:
        self.call = call
        self.cache = cache
        self.stateful = has_states(cache.layers)
        self.used: list[Entry] = []
        self.cached = 0
        self.prefilled = False


class _Told:
    """A streamer that has the prompt of a call, which is generated again from the beginning: the prompt comes again,
    and is not told again.

    Args:
        streamer: of the call.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_told = False

    def put(self, value: torch.Tensor) -> None:
        """As of a streamer: the prompt at the first call, tokens at each that follows."""
        if self._is_told:
            self._streamer.put(value)
        self._is_told = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


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
        self._columns = Columns(kept)
        self._new_cache = new_cache
        self._disk_tier = disk_tier
        self._tried: trials.StatesTrial | None = None

    def generate(self, call: Call, kwargs: dict[str, Any]) -> tuple[Any, tuple[RowReuse, ...]]:
        """What `model.generate` gives, and what each row began with."""
        if of.assisted(self._model, kwargs):
            call.why = "assisted decoding begins with the whole prompt"
            return self._generate(call, kwargs)
        try:
            return self._generate(call, kwargs)
        except GivenOthers:
            if of.waits_for_others(self._model):  # which compute nothing once more
                raise UnsupportedError(
                    "This way to generate computes other tokens than the rest of the prompt, and the weights are "
                    "sharded: use the model's own `generate`."
                ) from None
            call.why = "this way to generate computes other tokens than the rest of the prompt"
        except BudgetError:
            # To read what was there takes room too, that a prompt which is computed whole does not need.
            if not call.refused or of.waits_for_others(self._model):
                raise
            call.why = _NO_ROOM
        return self._generate(call, kwargs)

    def _generate(self, call: Call, kwargs: dict[str, Any]) -> tuple[Any, tuple[RowReuse, ...]]:
        """Generate, from what is there but where `call.why` says that nothing may be."""
        run = _Run(call, self._new_cache())
        try:
            return self._run(run, kwargs)
        except BaseException as error:
            self._failed(run, error)
            raise
        finally:
            try:
                self._end(run)
            finally:
                self._end(run)  # again: an interrupt may have cut the first one short, wherever it came

    def _run(self, run: _Run, kwargs: dict[str, Any]) -> tuple[Any, tuple[RowReuse, ...]]:
        """Begin, compute, keep."""
        call, cache = run.call, run.cache
        call.why = call.why or self._why_whole(run)
        whole, states = bool(call.why), dict[int, list[States]]()
        cache.begin(self._tokens(call, 0))
        run.cached = 0 if whole else self._begin(run)
        reuse = call.reuse(run.cached)
        try:
            if run.stateful and not whole:
                if self._states().in_cache:
                    run.prefilled = True
                    states = self._prefill(cache, call, run.cached)
                else:
                    cache.reset()
                    cache.begin(self._tokens(call, 0))
                    run.cached, call.why = 0, _IN_ITSELF
                    reuse = call.reuse(0)
            cache.prompt = self._tokens(call, call.ids.shape[1]) if cache.get_seq_length() else None
            if call.told and kwargs.get("streamer") is not None:
                kwargs = kwargs | {"streamer": _Told(kwargs["streamer"])}
            call.told = True
            out = self._model.generate(call.ids, attention_mask=call.mask, **{CACHE: cache}, **kwargs)
        except BaseException:
            # What is whole is kept: the next call continues it.
            with contextlib.suppress(*_NOT_KEPT):
                if not run.stateful:
                    cache.crop(0)
                    self._keep(run, states)
            raise
        try:
            self._keep(run, states, call.name)
        except _NOT_KEPT as error:
            self.problem = str(error) or repr(error)  # what was generated is not lost for it
        self._learn(run)
        return out, reuse

    def _failed(self, run: _Run, error: BaseException) -> None:
        """A call ends with an error."""
        if isinstance(error, BudgetError) and (run.cached or run.prefilled):
            with contextlib.suppress(KVTierError):
                run.call.refused = run.cache.get_seq_length() < run.call.ids.shape[1]
        if isinstance(error, CorruptionError):
            self._drop_corrupt(run.used, error)

    def _end(self, run: _Run) -> None:
        """A call holds nothing any more. Idempotent."""
        try:
            if run.call.tail is not None:
                run.call.tail.end()
            run.cache.close()
        finally:
            with self._memory.lock, self._memory.change:
                self._kept.release(run.used, run.cache)

    def _drop_corrupt(self, entries: Sequence[Entry], error: CorruptionError) -> None:
        """Some of these do not hold what was written: none of them is kept."""
        self.problem = str(error)
        with self._memory.lock, self._memory.change:
            self._kept.drop_corrupt(entries)

    # Begin

    def _why_whole(self, run: _Run) -> str:
        """Why `generate` computes the whole prompt in one forward, and nothing is there before; "": it need not."""
        constant = self._calls.constant
        if constant is not None and run.call.longest > constant:
            return f"beyond {constant} tokens, positions depend on the length"
        if run.stateful and self._tried is not None and not self._tried.in_cache:
            return _IN_ITSELF
        if run.stateful and of.waits_for_others(self._model):
            return _SHARDED
        if run.stateful and any(run.call.pads):
            return _PADDED  # also what is on the disk is of no use
        return ""

    def _begin(self, run: _Run) -> int:
        """Let a cache begin with what is there of its rows: columns, the padding included. `call.why` says why there
        are none."""
        call = run.call
        not_loaded = self._load(run)
        columns, why = self._follow_first(run)
        if columns or why != _NO_ROOM:
            columns = self._go_on(run, columns)
        if not columns:
            call.why = call.why or why or not_loaded or "nothing that is kept begins the same"
        return columns

    def _follow_first(self, run: _Run) -> tuple[int, str]:
        """Let a cache continue what is kept of its rows from their first tokens on. Columns, and why there are none
        although some were kept."""
        why = ""
        for _ in range(_TRIES):  # what goes meanwhile, or is damaged, leaves what is shorter
            columns, entries, states = self._find(run)
            if not columns:
                return 0, why
            try:
                got = self._follow(run, entries, columns)
            except BudgetError:
                run.cache.reset()
                return 0, _NO_ROOM
            except CorruptionError as error:
                self._drop_corrupt(entries, error)
                got, why = 0, "what was kept does not hold what was written"
            else:
                why = "what was kept was dropped meanwhile"
            if got and (not run.stateful or got == columns):
                self._began(run, entries, states, got)
                return got, ""
            run.cache.reset()
        return 0, why

    def _find(self, run: _Run) -> tuple[int, list[Entry], list[States]]:
        """Columns that are kept of every row from its first token on, what has them, and their states there. They are
        held from now on."""
        with self._memory.lock, self._memory.change:
            found = self._columns.with_states if run.stateful else self._columns.of
            columns, entries = found(run.call)
            run.used += entries
            self._kept.hold(entries, run.cache)
            return columns, entries, [entry.states[columns] for entry in entries] if run.stateful and columns else []

    def _follow(self, run: _Run, entries: Sequence[Entry], columns: int) -> int:
        """Let an empty cache continue these. The columns that it has then. Raises as `ParkedSequences.follow`."""
        if any(run.call.pads):
            return self._copy_rows(run.cache, run.call, entries, columns)
        rows = [entry.sequence for entry in entries for _ in range(run.call.expand)]
        return run.cache._forward.follow(self._kept.parked, rows, columns)

    def _began(self, run: _Run, entries: Sequence[Entry], states: Sequence[States], columns: int) -> None:
        """A cache continues so many columns of these, and has their states."""
        call, cache = run.call, run.cache
        if run.stateful:
            for i, layer in joined([state for state in states for _ in range(call.expand)]).items():
                cache.layers[i] = layer
            cache._recurrent.watch(cache.layers)
        with self._memory.lock, self._memory.change:
            self._kept.use(entries, [columns - pad for pad in call.pads])
        cache.begin(self._tokens(call, columns))

    def _go_on(self, run: _Run, columns: int) -> int:
        """Go on from the columns that are there with what is kept further on, and with what is loaded while the columns
        before it are computed. Columns that are there then."""
        if run.stateful or of.waits_for_others(self._model):
            return columns
        columns = self._fill(run, columns)
        tail = run.call.tail
        return columns if tail is None or columns >= tail.start else self._fill_to_tail(run, tail, columns)

    def _fill_to_tail(self, run: _Run, tail: Tail, columns: int) -> int:
        """Compute what is missing before a tail while that is loaded, and go on with it."""
        call = run.call
        tail.begin()
        began = time.perf_counter()
        if not self._compute(run, columns, tail.start):
            return columns
        of.synchronize(self._model)
        if self._disk_tier is not None:
            took = Took(tail.start - columns, columns, call.expand, time.perf_counter() - began)
            self._disk_tier.learn_overlapped(took)
        call.loaded[0], why = tail.wait()
        columns = self._fill(run, tail.start)
        if columns == call.filled:
            call.why = call.why or why
        return columns

    def _fill(self, run: _Run, columns: int) -> int:
        """Compute what is missing before tokens that are kept further on, and go on with these, gap by gap. Columns
        that are there then.

        Pensieve (section 4.3) does it within the prefill, by a kernel; a forward for each gap computes no more tokens
        than that, and needs nothing of a model.
        """
        call, passed = run.call, list[Entry]()
        while (piece := self._find_behind(run, columns, passed)) is not None:
            tokens, entry, start = piece
            if start < columns:
                run.cache.crop(start - columns)  # it has these tokens too
            elif start > columns and not self._compute(run, columns, start):
                break  # what is further on needs more room
            columns = start
            try:
                got = self._follow_on(run, entry, tokens)
            except BudgetError:
                break
            if not got:
                passed.append(entry)  # what is further on may be whole
                continue
            columns += got
            run.cache.begin(self._tokens(call, columns))
        if (piece is not None or passed) and columns == call.filled:
            call.why = "what was kept behind a gap was dropped meanwhile, or there is no room for it"
        return columns

    def _find_behind(self, run: _Run, columns: int, passed: Sequence[Entry]) -> tuple[int, Entry, int] | None:
        """The next tokens that are kept behind some columns: how many, what has them, and where they begin. They are
        held from now on."""
        with self._memory.lock, self._memory.change:
            tokens, entry = self._columns.behind(run.call, columns, passed)
            if entry is None:
                return None
            run.used.append(entry)
            self._kept.hold([entry], run.cache)
            return tokens, entry, entry.sequence.start

    def _follow_on(self, run: _Run, entry: Entry, tokens: int) -> int:
        """Go on with what is kept from where a cache ends. The tokens that are there of it; 0: none is any more.

        Raises:
            BudgetError: there is no room for what others use besides.
        """
        try:
            got = run.cache._forward.follow_on(self._kept.parked, entry.sequence, tokens)
        except CorruptionError as error:
            self._drop_corrupt([entry], error)
            return 0
        with self._memory.lock, self._memory.change:
            self._kept.use([entry], [got])
        return got

    def _compute(self, run: _Run, start: int, stop: int) -> bool:
        """Compute columns that are missing. False: there is no room for them."""
        try:
            self._forward(run.cache, run.call, start, stop)
        except BudgetError:
            run.cache.crop(0)  # what the forward did not finish
            return False
        run.call.filled += stop - start
        return True

    def _load(self, run: _Run) -> str:
        """Load what is saved of the rows. Why some of it was not."""
        call, why = run.call, ""
        if self._disk_tier is None:
            return why
        if len(call.rows) == 1 and not run.stateful and not any(call.pads):
            step = run.cache._forward.options.whole_blocks
            found = self._disk_tier.load_some(call.key, call.rows[0][:-WIDTH], step, call.expand)
            call.loaded[0], why, call.tail = found
            return why
        for number, row in enumerate(call.rows):
            call.loaded[number], not_loaded = self._disk_tier.load(
                call.key, row[:-WIDTH], stateful=run.stateful, rows=call.expand
            )
            why = why or not_loaded
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
        last, found = call.ids.shape[1] - 1, dict[int, list[States]]()
        while cached < last:
            stop = min(last, (cached // SPACING + 1) * SPACING)
            if cached and not self._states().go_on:
                stop = cached + 1
            self._forward(cache, call, cached, stop)
            cached = stop
            if stop == last or stop % SPACING == 0:
                try:
                    found[stop] = [copied(cache.layers, row * call.expand) for row in range(len(call.rows))]
                except _NOT_KEPT as error:  # later calls begin further back
                    self.problem = str(error) or repr(error)
                for extra in list(found)[1 : max(len(found) - MOST_STATES + 1, 1)]:
                    del found[extra]
        return found

    def _states(self) -> trials.StatesTrial:
        """How the model continues from states: tried once."""
        if self._tried is None:
            self._tried = trials.tried_states(of.inner(self._model))
        return self._tried

    def _forward(self, cache: JournalledCache, call: Call, start: int, stop: int) -> None:
        """Compute these columns of a prompt, behind those that a cache holds."""
        model, ids = of.inner(self._model), self._tokens(call, stop)
        mask = call.mask[:, :stop].repeat_interleave(call.expand, 0).to(ids.device)
        with torch.no_grad():
            model(
                input_ids=ids[:, start:],
                attention_mask=mask,
                use_cache=True,
                **{CACHE: cache},
                **of.positions(model, mask, start),
                **({"logits_to_keep": 1} if of.takes_logits_to_keep(model) else {}),
            )

    def _tokens(self, call: Call, columns: int) -> torch.Tensor:
        """The ids of the first columns of a prompt, for each row of a cache, where the model is: a call may have them
        elsewhere."""
        return call.ids[:, :columns].repeat_interleave(call.expand, 0).to(of.device_of(self._model))

    def _learn(self, run: _Run) -> None:
        """Learn what a prefill takes. Where work goes on behind the CPU's back, what a forward takes is known if its
        token is chosen before the next one."""
        if self._disk_tier is not None and (not run.stateful or of.device_of(self._model).type == "cpu"):
            self._disk_tier.learn(run.cache.took)

    # Keep

    def _keep(self, run: _Run, states: dict[int, list[States]], name: str | None = None) -> None:
        """Keep what a cache holds; as the history of a conversation, where it has one row and there is a name."""
        cache, call, stateful = run.cache, run.call, run.stateful
        length, constant = cache.get_seq_length(), self._calls.constant
        if cache.unknown or cache.ids.shape[1] < length or not length:
            return
        if stateful and (any(call.pads) or (self._tried is not None and not self._tried.in_cache)):
            return  # the padding is part of a state, or the model keeps states where nobody copies them
        if call.why == _SHARDED:
            return  # the next call does not continue it either
        if constant is not None and cache.longest >= constant:
            return  # keys of a longer sequence are others; what stretched them is taken back below the limit only
        if "position_ids" in vars(cache):
            return  # the model (Qwen4-Exp, Transformers 5.17) keeps them in the cache itself, and not in a layer
        if call.depends != dependence.depends(self._model):
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
            if not mine:
                continue
            entry = self._kept.keep(cache, call.key, row, pad, packed(mine), at, named, epoch=call.epoch)
            if entry is not None and self._disk_tier is not None:
                self._disk_tier.save(entry)
