"""`ConversationStore`: `generate` that begins where an earlier call left off, if that is the same beginning."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from kvtier.config import Size, checks_names, parse_bytes
from kvtier.conversation.caches import Caches
from kvtier.conversation.calls.call import Calls
from kvtier.conversation.calls.encoder import EncoderReuse
from kvtier.conversation.calls.prefix_reuse import PrefixReuse
from kvtier.conversation.calls.reuse import ReuseCounts, RowReuse, StoreStats
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.given import check_count, check_name, check_salt, check_seconds, check_span, token_ids
from kvtier.conversation.index import WIDTH, packed
from kvtier.conversation.journal import note_forward
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.kept.ranks import naming_who_is_pinned, rank_of
from kvtier.conversation.kept.verify import verify
from kvtier.conversation.names import Conversations, what_is_lost
from kvtier.conversation.saved.disk_tier import DiskTier, prefix
from kvtier.conversation.saved.soon import Soon
from kvtier.conversation.saved.wake import Wake, Waker
from kvtier.errors import BudgetError, ClosedError, ConcurrentUseError, ConfigError, CorruptionError, StoreInUseError
from kvtier.eviction.policies.names import policy_of
from kvtier.eviction.policy import EvictionPolicy
from kvtier.forks import heed
from kvtier.frames import is_running
from kvtier.hf.models import generation as of
from kvtier.hf.models.devices import devices_of
from kvtier.hf.models.names import ARGUMENTS
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policy import Policy


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
    budget of their own. The idea is Pensieve's (section 4); shared blocks are vLLM's.

    Args:
        model: of Transformers. Of an encoder-decoder, what the encoder gave is used again where a call has the same
            inputs; its keys and values are Transformers' own.
        memory: a `kvtier.TieredMemory` that others may use too; without it, one is made with these budgets.
        device_budget, host_budget, policy, audit: as for `TieredMemory`.
        block_size, host_attention: as for `TieredKVCache`.
        directory: where what is kept is saved in the background, for later processes with the same model: bound to
            every weight and the config. Without one, what is kept ends with the store.
        loading: "auto" reads from the disk what is expected to be there sooner than it is computed again, by what both
            took before, and may compute the head of it meanwhile; "always" all that is saved and not in memory.
        disk_budget: bytes on the disk: an int or a string; keys and values that were used longest ago go first. None:
            no limit. Names, ids and messages count, and are saved in any case.
        state_budget: bytes of all copies of states, an int or a string; what was used longest ago goes first. They are
            where the model is, and are not part of the other budgets.
        eviction: which of what is kept goes first where the memory is full: a `kvtier.EvictionPolicy`, or "lru",
            "arc", "s3-fifo", "lfu", "second-use", "pensieve"; None: "adaptive", which follows the best of some of them.

    Raises:
        ConfigError: an option that is malformed; a directory that cannot be used, or is of another model.
        StoreInUseError: the directory is open in another store or process.

    Any number of threads may call `generate` at a time.
    """

    @checks_names
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
        #: For an engine on this store, too.
        self.caches = Caches(model.config, memory, block_size, host_attention)
        if loading not in ("auto", "always"):
            raise ConfigError(f"loading={loading!r}: give 'auto' or 'always'.")
        states = parse_bytes("state_budget", state_budget)
        self._kept = Kept(memory, self.caches.new, policy_of(eviction), states, self.caches.forms)
        self._weights = of.weights_version(model)
        self._last = threading.local()
        self._calls = Calls(model)
        self._encoder = EncoderReuse(model, memory, self._kept, states)
        self._reused = ReuseCounts(memory)
        # Calls under way, the thread of each, and its frame.
        self._active: dict[object, tuple[int, FrameType]] = {}
        #: Engines that serve from it.
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._disk_tier: DiskTier | None = None
        self._soon = Soon()
        self.closed = False
        if directory is None and disk_budget is not None:
            raise ConfigError("disk_budget is given without a directory.")
        limit = None if disk_budget is None else parse_bytes("disk_budget", disk_budget)
        disk = None if directory is None else Disk(directory, limit, of.fingerprint(model), prefix())
        try:
            self._begin(disk, loading)
        except BaseException:
            if disk is not None:
                disk.close()  # else it is open as long as somebody holds the error, as a notebook does
            raise

    def _begin(self, disk: Disk | None, loading: Literal["auto", "always"]) -> None:
        """Make what knows the folder, and take what is saved there. At the end, listen to the model."""
        model, memory = self.model, self.memory
        if disk is not None:
            devices = functools.partial(devices_of, model)
            self._disk_tier = DiskTier(disk, memory, self._kept, self.caches, devices, loading)
        self._conversations = Conversations(self, memory, disk, self._kept.ranks)
        for name in self._conversations.ranked:
            chat = self._conversations.find(name)
            if chat is not None:
                self._ranked_before(chat)
                self._conversations.let_go()
        if disk is not None:
            disk.expire()
        self._reuse = PrefixReuse(model, self._calls, memory, self._kept, self.caches.new, self._disk_tier)
        self._waker = Waker(memory, self._kept, self._disk_tier, self.caches.stateful, weakref.ref(self))
        heed(self)
        self._hook = of.inner(model).register_forward_pre_hook(note_forward, with_kwargs=True)

    def forked(self) -> None:
        """As of `Inherited`: calls of threads that are not here go on in the parent only."""
        mine = threading.get_ident()
        self._active = {call: each for call, each in self._active.items() if each[0] == mine}

    def _ranked_before(self, chat: Conversation) -> None:
        """Let a conversation that was saved have its rank."""
        key = of.computed_as(self.model), chat.salt
        with self.memory.lock, self.memory.change:
            self._kept.ranks.follow(chat.name, key, packed(chat.ids[:-1]), chat.rank)
        if self._disk_tier is not None:
            self._disk_tier.disk.rank(chat.name, chat.salt, packed(chat.ids[:-1]), chat.rank, chat.used)

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
            ConfigError: a cache was given.
            BudgetError: as of `TieredKVCache`. Whatever else `model.generate` raises passes. What was kept before is
                kept.
        """
        self._check_open()
        # Taken: what a streamer of this call generates is no turn of its conversation.
        turn_of, self._last.name = getattr(self._last, "name", None), None
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        check_salt(salt)
        given = (
            of.setting("cache_implementation", self.model, kwargs) if hasattr(self.model, "generation_config") else None
        )
        for name in ARGUMENTS:
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name}: the store brings its own cache. Leave it out, or call model.generate.")
        if given not in (None, "hybrid"):  # which models of the Hub ask for, and `generate` leaves out
            raise ConfigError(
                f"cache_implementation={given!r}: the store brings its own cache. Leave it out, and set it to None in "
                "model.generation_config if it is there, or call model.generate."
            )
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        with self.in_use():
            depends = self._check_weights()
            epoch = self._kept.epoch
            call, why = self._calls.read(ids, kwargs, salt, depends)
            with naming_who_is_pinned(self.memory, self._kept.ranks):
                if call is not None:
                    call.name, call.epoch = turn_of, epoch
                    for row in call.rows:
                        self._waker.turn(call.key, row)
                    out, rows = self._reuse.generate(call, kwargs)
                elif self.model.config.is_encoder_decoder:
                    out, rows = self._encoder.generate(ids, kwargs, inputs is None, salt, depends, epoch)
                else:
                    out, rows = self._plain(ids, kwargs, inputs is None, why)
            # At the end, for a streamer's calls within have their own.
            self._last.computed_as = depends.computed_as
            return self._reused.add(out, rows)

    @property
    def reuse(self) -> tuple[RowReuse, ...]:
        """What each row of this thread's last call began with."""
        return self._reused.last

    def _plain(self, ids: Any, kwargs: dict[str, Any], named: bool, why: str) -> tuple[Any, tuple[RowReuse, ...]]:
        """A call that re-uses nothing. `named`: the ids were given by name."""
        rows = ids.shape[0] if isinstance(ids, torch.Tensor) and ids.dim() else 1
        tokens = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 0
        with contextlib.ExitStack() as stack:
            if self._calls.takes_cache and of.setting("use_cache", self.model, kwargs) is not False:
                kwargs[of.cache_argument(self.model)] = stack.enter_context(self.caches.plain())
            return of.generate(self.model, ids, kwargs, named), (RowReuse(tokens, 0, tokens, why),) * rows

    def flush(self) -> None:
        """Return when all that is kept is saved, or cannot be; `stats.problem` says why."""
        self._check_open()
        self._flush()

    def _flush(self) -> list[str]:
        """As `flush`. The names of conversations that could not be saved."""
        if self._disk_tier is None:
            return []
        self._soon.join()
        lost = self._conversations.save_all()
        self._conversations.let_go()
        self._disk_tier.flush()
        return lost

    # Conversations

    def open(
        self,
        name: str,
        *,
        salt: Hashable = None,
        new: bool = False,
        pinned: bool | None = None,
        priority: int | None = None,
        ttl: float | None = None,
    ) -> Conversation:
        """The conversation of a name, made where there is none. All who hold it have the same object. One that nobody
        holds and that was never gone on with may be forgotten; what was said in one stays, in memory or on the disk.

        Args:
            salt: of its calls; see `generate`.
            new: there must be none.
            pinned, priority, ttl: what is kept of it is worth; see `Conversation`. None: as it is, and at the beginning
                False, 0 and `math.inf`.

        Raises:
            ConfigError: what no conversation can be named, or a name that is taken where `new`; the conversation has
                another salt, or is saved and cannot be read now; or a rank that cannot be.
            BudgetError: see `Conversation.pinned`.
        """
        self._check_open()
        check_name(name)
        check_salt(salt)
        rank_of(
            False if pinned is None else pinned, 0 if priority is None else priority, math.inf if ttl is None else ttl
        )  # what is wrong makes no conversation
        self._conversations.let_go()
        found = self._conversations.open(name, salt, new)
        if (pinned, priority, ttl) != (None, None, None):
            found.set_rank(pinned=pinned, priority=priority, ttl=ttl)
        return found

    def find(self, name: str) -> Conversation | None:
        """The conversation of a name; None: there is none. It is in memory from now on, as long as somebody holds it.

        Raises:
            ConfigError: what no conversation can be named; or it is saved and cannot be read now.
        """
        self._check_open()
        check_name(name)
        self._conversations.let_go()
        return self._conversations.find(name)

    @contextlib.contextmanager
    def going_on(self, chat: Conversation) -> Iterator[None]:
        """This thread's calls within are a conversation's."""
        self._last.name = chat.name
        try:
            yield
        finally:
            self._last.name = None

    def forget(self, name: str) -> None:
        """Forget the name of a conversation, whether it was opened or not; see `Conversation.close`. Nothing, if there
        is none.

        Raises:
            ConfigError: what no conversation can be named.
        """
        self._check_open()
        check_name(name)
        self._conversations.forget(name)

    def remove(self, chat: Conversation) -> None:
        """A conversation is closed: its name is free. May be done again where it was cut short."""
        self._conversations.remove(chat)

    def changed(self, chat: Conversation, *, generated: bool = False) -> None:
        """A conversation went on, by this thread's last call or in another way: its history has its rank, and what it
        is is saved. Nothing, if its name was forgotten meanwhile."""
        with self._conversations.lock:
            self._follow(chat, self._last.computed_as if generated else of.computed_as(self.model))
            self._save(chat)

    def went_on(self, chat: Conversation) -> None:
        """The same, by an engine, whose steps wait for no disk: what the conversation is is saved soon."""
        self._follow(chat, of.computed_as(self.model))
        if self._disk_tier is not None:
            self._soon.put(chat, functools.partial(self._save, chat))

    def _follow(self, chat: Conversation, computed_as: Hashable) -> None:
        """The history of a conversation has its rank."""
        ids = chat.ranked_ids
        with self.memory.lock, self.memory.change:
            if not self.closed and self._conversations.has(chat):
                self._kept.ranks.follow(chat.name, (computed_as, chat.salt), ids, chat.rank)

    def _save(self, chat: Conversation) -> None:
        """What a conversation is is saved, and its history there has its rank."""
        with self._conversations.lock:
            if self._disk_tier is None or self.closed or not self._conversations.has(chat):
                return
            self._disk_tier.disk.rank(chat.name, chat.salt, chat.ranked_ids, chat.rank, chat.used)
            self._conversations.save(chat)

    def ranked(self, chat: Conversation) -> None:
        """A conversation has another rank. Raises BudgetError, see `Conversation.pinned`."""
        key = (of.computed_as(self.model), chat.salt)
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            self._kept.ranks.rank(chat.name, key, packed(chat.ids[:-1]), chat.rank)
        self.changed(chat)

    @property
    def names(self) -> list[str]:
        """Of all conversations."""
        return self._conversations.names

    def park(self, ids: Sequence[int], *, salt: Hashable = None) -> None:
        """Let what is kept of these tokens leave the device, as far as the host has room.

        Raises:
            ConfigError: what is no token ids, or a salt that cannot be compared.
        """
        self._check_open()
        check_salt(salt)
        keys, row = self._keys(salt), token_ids(ids)
        with self.memory.lock, self.memory.change, contextlib.suppress(BudgetError):
            self.memory.collect()
            for _, entry in [each for key in keys for each in self._kept.pieces(key, row)]:
                self._kept.parked.leave(entry.sequence)

    def drop(self, ids: Sequence[int], start: int, stop: int, *, salt: Hashable = None) -> None:
        """Give up what is kept of the tokens from `start` to `stop` of a sequence, in whole blocks. What follows them
        stays: the next call with these ids computes what is missing, and goes on with it.

        A model whose layers have windows or recurrent states can go on at some positions only: there, what follows is
        given up too. What is saved on the disk stays.

        Raises:
            ConfigError: what is no token ids, positions that they do not have, or a salt that cannot be compared.
        """
        self._check_open()
        check_salt(salt)
        keys, row = self._keys(salt), token_ids(ids)
        check_span(start, stop, len(row) // WIDTH)
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            for key in keys:
                self._kept.cut_out(key, row, start, stop)

    def wake(self, ids: Sequence[int], *, salt: Hashable = None, timeout: float | None = None) -> Wake:
        """Bring what is kept of these tokens nearer, for a turn is known to come: from the disk to the host, as a call
        would, and from the host to the device, as far as there is room besides what caches use. In the background, and
        in the way of no call; a call that begins with these tokens ends it, and so does `close`.

        Args:
            timeout: seconds after which it ends, whatever has come until then. Without one it ends too where it waits
                for room, or for copies of others, for half a minute.

        Raises:
            ConfigError: what is no token ids, a timeout that is not a number of seconds, or a salt that cannot be
                compared.
        """
        self._check_open()
        check_salt(salt)
        check_seconds("timeout", timeout)
        key, *others = self._keys(salt)
        return self._waker.submit(key, token_ids(ids), timeout, others)

    def _keys(self, salt: Hashable) -> tuple[Hashable, ...]:
        """Under which tokens are kept that the model reads now."""
        return self.caches.forms((of.computed_as(self.model), salt))

    # Life

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Nobody closes it within.

        Raises:
            ClosedError: it was closed.
        """
        call = object()
        try:
            with self.memory.lock, self.memory.change:
                self._check_open()
                self._active[call] = threading.get_ident(), sys._getframe(2)  # behind this one and that of `with`
            yield
        finally:
            with self.memory.lock, self.memory.change:
                self._active.pop(call, None)

    def _check_weights(self) -> of.Depends:
        """Drop everything if the model was changed: other weights make other keys and values. What is saved is of the
        weights that there were when the folder was opened: it is left alone from now on. What the model is now."""
        depends = of.depends(self.model)
        now = depends.weights
        if now != self._weights:
            if self._disk_tier is not None:
                self._disk_tier.stopped = True
                self._waker.stop()  # what it reads is of the weights before
                self._reuse.problem = "the model was changed since the folder was opened: nothing is saved or loaded"
            self.clear()
            self._weights = now
        return depends

    def verify(self, sequences: int = 1) -> int:
        """Compute some sequences that are kept again, chosen at random, and compare their keys and values.

        What layers with windows or recurrent states keep is not compared. Takes a prefill of each, and device memory
        for two dense copies of its keys and values meanwhile, outside of the budgets.

        Args:
            sequences: how many, at the most.

        Returns:
            The tokens that were compared.

        Raises:
            CorruptionError: they differ by more than rounding. That sequence is not kept any more.
            ConfigError: a number that is none.
        """
        self._check_open()
        check_count("sequences", sequences, 0)
        with self.in_use():
            now = self._check_weights().computed_as
            try:
                return verify(
                    self.model,
                    self.memory,
                    self._kept,
                    self.caches.new_for,
                    lambda key: self.caches.forms(key)[0][0] == now,  # type: ignore[index]
                    sequences,
                )
            except CorruptionError as error:
                self._reuse.problem = str(error)
                raise

    # For an engine on this store

    @property
    def kept(self) -> Kept:
        """What is kept in memory."""
        return self._kept

    @property
    def positions_vary(self) -> bool:
        """Whether keys depend on how long a sequence is."""
        return self._calls.varies

    @property
    def disk_tier(self) -> DiskTier | None:
        """Saves what is kept, and loads it; None: nothing does, or not any more."""
        return None if self._disk_tier is None or self._disk_tier.stopped else self._disk_tier

    def bring(self, key: Hashable, ids: bytes) -> Wake:
        """As `wake`, of what an engine keeps under a key."""
        self._check_open()
        return self._waker.submit(key, ids)

    def turn_of(self, name: str, salt: Hashable) -> Conversation:
        """As `open`, in the way of a step: it waits for no disk where somebody holds what `find` gave.

        Raises:
            ConfigError: as of `open`.
        """
        self._check_open()
        return self._conversations.open(name, salt, False)

    def check_weights(self) -> of.Depends:
        """Drop everything if the model was changed. What it is now."""
        self._check_open()
        return self._check_weights()

    def clear(self) -> None:
        """Drop all that is kept. What calls that are running have computed is not kept."""
        self._check_open()
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            self._kept.clear()
            self._encoder.clear()

    @property
    def stats(self) -> StoreStats:
        """What is kept and what that was good for, now."""
        disk = None if self._disk_tier is None else self._disk_tier.disk
        parts = (self._reuse, self._encoder, self._waker, *(() if disk is None else (disk,)))
        with self.memory.lock, self.memory.change:
            return StoreStats(
                self._reused.calls,
                self._reused.prompt_tokens,
                self._reused.cached_tokens,
                len(self._kept.entries),
                sum(x.sequence.length for x in self._kept.entries.values()),
                self._kept.state_bytes + self._encoder.nbytes,
                self._kept.dropped,
                *((0, 0) if disk is None else (disk.room.nbytes + disk.room.rest, disk.damaged)),
                next(filter(None, (x.problem for x in parts)), ""),
            )

    def close(self) -> None:
        """Drop all that is kept and leave the model as it was. Idempotent. A `RuntimeWarning` names the conversations
        that the disk did not take.

        Raises:
            ConcurrentUseError: another thread is generating, or this one is: what it calls cannot close it.
            StoreInUseError: an `Engine` uses it. Nothing was changed.
        """
        lost: list[str] = []
        if not self.closed:
            if any(not engine.closed for engine in self.engines):
                raise StoreInUseError("An Engine uses this ConversationStore: close that first. Nothing was changed.")
            self._waker.stop()
            if not self._in_call:
                lost = self._flush()
            with self.memory.lock, self.memory.change:
                if self._in_call:
                    raise ConcurrentUseError(
                        "Another thread is generating with this ConversationStore, or saves a turn, or this one is, "
                        "and a streamer or a stopping criterion closes it. Wait for its end."
                    )
                self.closed = True
        # What follows may be done twice: whatever cuts it short, the next `close` goes on.
        self._waker.close()  # before what it brings would have no owner
        if self._disk_tier is not None and not self._disk_tier.disk.closed:
            self._disk_tier.flush()  # of calls that have ended since
        self._hook.remove()
        self._encoder.clear()
        self.caches.close()
        self._kept.close()
        if self._disk_tier is not None:
            self._disk_tier.close()
        if self._own:
            self.memory.close()
        if lost and self._disk_tier is not None:  # last: where warnings are errors, all is closed
            warnings.warn(what_is_lost(lost, self._disk_tier.disk), RuntimeWarning, stacklevel=2)

    @property
    def _in_call(self) -> bool:
        """Whether another thread is in a call, or this one in one that was not interrupted."""
        me = threading.get_ident()
        return any(thread != me or is_running(call) for thread, call in list(self._active.values()))

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
        with self.memory.lock, self.memory.change:
            self._kept.check_integrity()
