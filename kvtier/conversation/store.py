"""`ConversationStore`: `generate` that begins where an earlier call left off, if that is the same beginning."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier.config import Size, checks_names, parse_bytes
from kvtier.conversation.caches import Caches
from kvtier.conversation.calls.call import Calls
from kvtier.conversation.calls.generating import Generating
from kvtier.conversation.calls.reuse import RowReuse, StoreStats
from kvtier.conversation.calls.under_way import UnderWay
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows.conversations import ids_of
from kvtier.conversation.erasing import erase as remove
from kvtier.conversation.erasing import shared
from kvtier.conversation.given.arguments import (
    check_count,
    check_name,
    check_salt,
    check_seconds,
    check_span,
    memory_of,
    token_ids,
)
from kvtier.conversation.index import WIDTH
from kvtier.conversation.journal import note_forward
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.kept.ranks import rank_of
from kvtier.conversation.kept.verify import verify
from kvtier.conversation.names import Conversations, what_is_left, what_is_lost
from kvtier.conversation.saved.disk_tier import DiskTier, prefix
from kvtier.conversation.saved.wake import Wake, Waker
from kvtier.errors import BudgetError, ConfigError, CorruptionError, StoreInUseError, UnsupportedError
from kvtier.eviction.policies.names import EvictionName, policy_of
from kvtier.eviction.policy import EvictionPolicy
from kvtier.hf.models import generation as of
from kvtier.hf.models.devices import devices_of
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.identity.fingerprint import fingerprint
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policies.names import PolicyName
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
            where the model is, and are not part of the other budgets. 0: none is kept, and nothing of a model that has
            such states is used again.
        eviction: which of what is kept goes first where the memory is full: a `kvtier.EvictionPolicy`, or "lru",
            "arc", "s3-fifo", "lfu", "second-use", "pensieve"; None: "adaptive", which follows the best of some of them.

    Raises:
        ConfigError: an option that is malformed; a directory that cannot be used, or is of another model.
        UnsupportedError: a directory, and the model is divided over processes.
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
        policy: Policy | PolicyName | None = None,
        audit: Literal["off", "sampled", "full"] | None = None,
        block_size: int | Literal["auto"] = "auto",
        host_attention: bool = True,
        directory: str | Path | None = None,
        disk_budget: Size | None = None,
        loading: Literal["auto", "always"] = "auto",
        state_budget: Size = "1GiB",
        eviction: EvictionPolicy | EvictionName | None = None,
    ) -> None:
        of.check_model(model)
        if directory is not None and of.mesh_of(model) is not None:
            raise UnsupportedError(
                "directory=: the model is divided over processes. What they read takes different times, and each would "
                "begin a call with other tokens. Leave out the directory."
            )
        self._own = memory is None
        memory = memory_of(memory, device_budget, host_budget, policy, audit)
        self.model = model
        self.memory = memory
        #: For an engine on this store, too.
        self.caches = Caches(model.config, memory, block_size, host_attention)
        if loading not in ("auto", "always"):
            raise ConfigError(f"loading={loading!r}: give 'auto' or 'always'.")
        states = parse_bytes("state_budget", state_budget, zero=True)
        self._kept = Kept(memory, self.caches.new, policy_of(eviction), states, self.caches.forms)
        self._weights = dependence.weights_version(model)
        self._calls = Calls(model)
        self._under_way = UnderWay(memory)
        #: Engines that serve from it.
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._disk_tier: DiskTier | None = None
        if directory is None and disk_budget is not None:
            raise ConfigError("disk_budget is given without a directory.")
        limit = None if disk_budget is None else parse_bytes("disk_budget", disk_budget)
        disk = (
            None if directory is None else Disk(directory, limit, fingerprint(model), prefix(), self.caches.has_states)
        )
        try:
            self._begin(disk, loading, states)
        except BaseException:
            if disk is not None:
                disk.close()  # else it is open as long as somebody holds the error, as a notebook does
            raise

    def _begin(self, disk: Disk | None, loading: Literal["auto", "always"], states: int) -> None:
        """Make what knows the folder, and take what is saved there. At the end, listen to the model."""
        model, memory = self.model, self.memory
        if disk is not None:
            devices = functools.partial(devices_of, model)
            self._disk_tier = DiskTier(disk, memory, self._kept, self.caches, devices, loading)
        #: By name, for themselves.
        self.conversations = Conversations(self, memory, disk, self._kept.ranks)
        self.conversations.rank_saved()
        if disk is not None:
            disk.expire()
            disk.fit()
        tier = self._disk_tier
        self._waker = Waker(memory, self._kept, tier, self.caches.stateful, weakref.ref(self))
        self._generating = Generating(model, memory, self._kept, self.caches, self._calls, tier, self._waker, states)
        self._hook = of.inner(model).register_forward_pre_hook(note_forward, with_kwargs=True)

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
        return self.generate_turn(None, inputs, generation_config, salt=salt, **kwargs)

    def generate_turn(
        self,
        turn_of: str | None,
        /,
        inputs: torch.Tensor | None = None,
        generation_config: Any = None,
        *,
        salt: Hashable = None,
        **kwargs: Any,
    ) -> Any:
        """As `generate`, as a turn of the conversation of a name; None: of none."""
        self._under_way.check_open()
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        check_salt(salt)
        self._calls.check(kwargs)
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        with self.in_use():
            depends = self._check_weights()
            out = self._generating.generate(ids, kwargs, inputs is None, salt, depends, turn_of)
            # At the end, for a streamer's calls within have their own.
            self.conversations.generated(depends.computed_as)
            return out

    @property
    def reuse(self) -> tuple[RowReuse, ...]:
        """What each row of this thread's last call began with."""
        return self._generating.counts.last

    def flush(self) -> None:
        """Return when all that is kept is saved, or cannot be; `stats.problem` says why."""
        self._under_way.check_open()
        self._flush()

    def _flush(self) -> list[str]:
        """As `flush`. The names of conversations that could not be saved."""
        if self._disk_tier is None:
            return []
        lost = self.conversations.save_all()  # first what nobody can compute again
        self._disk_tier.flush()
        self.conversations.note_ranks()
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
            name: of the conversation, a string that is not empty.
            salt: of its calls; see `generate`.
            new: there must be none.
            pinned, priority, ttl: what is kept of it is worth; see `Conversation`. None: as it is, and at the beginning
                False, 0 and `math.inf`.

        Raises:
            ConfigError: what no conversation can be named, or a name that is taken where `new`; the conversation has
                another salt, or is saved and cannot be read now; or a rank that cannot be.
            BudgetError: see `Conversation.pinned`.
        """
        self._under_way.check_open()
        check_name(name)
        check_salt(salt)
        rank_of(
            False if pinned is None else pinned, 0 if priority is None else priority, math.inf if ttl is None else ttl
        )  # what is wrong makes no conversation
        self.conversations.let_go()
        found = self.conversations.open(Conversation(self, name, salt), new)
        if (pinned, priority, ttl) != (None, None, None):
            found.set_rank(pinned=pinned, priority=priority, ttl=ttl)
        return found

    def find(self, name: str) -> Conversation | None:
        """The conversation of a name; None: there is none. It is in memory from now on, as long as somebody holds it.

        Raises:
            ConfigError: what no conversation can be named; or it is saved and cannot be read now.
        """
        self._under_way.check_open()
        check_name(name)
        self.conversations.let_go()
        return self.conversations.find(name)

    def forget(self, name: str, *, erase: bool = False) -> None:
        """Forget the name of a conversation, whether it was opened or not; see `Conversation.close`. Nothing, if there
        is none.

        Args:
            name: of the conversation.
            erase: before that, remove, from memory and disk, what is kept of its tokens and what continues them, behind
                those that another conversation of its salt begins with, and all that an encoder gave under its salt. A
                file stays that has some of these at its beginning, with all that it holds. All conversations are read,
                and what waits to be saved is saved before.

        Raises:
            ConfigError: what no conversation can be named; with `erase`, a conversation cannot be read now, or what is
                saved cannot be removed: the name stays, and may be forgotten again.
        """
        check_name(name)
        with self.in_use():
            chat = self.find(name) if erase else None
            if chat is not None:
                ids, start = ids_of(vars(chat)), shared(chat, self.conversations)
                self._waker.erased(chat.salt, ids, start)
                self._generating.encoder.erase(chat.salt)
                remove(chat.salt, ids, start, self.memory, self._kept, self._disk_tier)
            self.conversations.forget(name)

    @property
    def names(self) -> list[str]:
        """Of all conversations."""
        return self.conversations.names

    def park(self, ids: Sequence[int], *, salt: Hashable = None) -> None:
        """Let what is kept of these tokens leave the device, as far as the host has room.

        Raises:
            ConfigError: what is no token ids, or a salt that cannot be compared.
        """
        self._under_way.check_open()
        check_salt(salt)
        keys, row = self._keys(salt), token_ids(ids)
        with self.memory.lock, self.memory.change, contextlib.suppress(BudgetError):
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
        self._under_way.check_open()
        check_salt(salt)
        keys, row = self._keys(salt), token_ids(ids)
        check_span(start, stop, len(row) // WIDTH)
        with self.memory.lock, self.memory.change:
            for key in keys:
                self._kept.cut_out(key, row, start, stop)

    def wake(self, ids: Sequence[int], *, salt: Hashable = None, timeout: float | None = None) -> Wake:
        """Bring what is kept of these tokens nearer, for a turn is known to come: from the disk to the host, as a call
        would, and from the host to the device, as far as there is room besides what caches use. In the background, and
        in the way of no call; a call that begins with these tokens ends it, and so does `close`.

        Args:
            ids: token ids that the turn will begin with.
            salt: of what is kept; see `generate`.
            timeout: seconds after which it ends, whatever has come until then. Without one it ends too where it waits
                for room, or for copies of others, for half a minute.

        Raises:
            ConfigError: what is no token ids, a timeout that is not a number of seconds, or a salt that cannot be
                compared.
        """
        self._under_way.check_open()
        check_salt(salt)
        check_seconds("timeout", timeout)
        key, *others = self._keys(salt)
        return self._waker.submit(key, token_ids(ids), timeout, others)

    def _keys(self, salt: Hashable) -> tuple[Hashable, ...]:
        """Under which tokens are kept that the model reads now."""
        return self.caches.forms((dependence.computed_as(self.model), salt))

    # Life

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._under_way.closed

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Nobody closes it within.

        Raises:
            ClosedError: it was closed.
        """
        return self._under_way.one()

    def _check_weights(self) -> dependence.Depends:
        """Drop everything if the model was changed: other weights make other keys and values. What is saved is of the
        weights that there were when the folder was opened: it is left alone from now on. What the model is now."""
        depends = dependence.depends(self.model)
        now = depends.weights
        if now != self._weights:
            if self._disk_tier is not None:
                self._disk_tier.stopped = True
                self._waker.stop()  # what it reads is of the weights before
                self._generating.prefixes.problem = (
                    "the model was changed since the folder was opened: nothing is saved or loaded"
                )
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
        self._under_way.check_open()
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
                self._generating.prefixes.problem = str(error)
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
        self._under_way.check_open()
        return self._waker.submit(key, ids)

    def turn_of(self, name: str, salt: Hashable) -> Conversation:
        """As `open`, in the way of a step: it waits for no disk where somebody holds what `find` gave.

        Raises:
            ConfigError: as of `open`.
        """
        self._under_way.check_open()
        return self.conversations.open(Conversation(self, name, salt), False)

    def check_weights(self) -> dependence.Depends:
        """Drop everything if the model was changed. What it is now."""
        self._under_way.check_open()
        return self._check_weights()

    def clear(self) -> None:
        """Drop all that is kept. What calls that are running have computed is not kept."""
        self._under_way.check_open()
        with self.memory.lock, self.memory.change:
            self._kept.clear()
            self._generating.encoder.clear()

    @property
    def stats(self) -> StoreStats:
        """What is kept and what that was good for, now."""
        return self._generating.stats(None if self._disk_tier is None else self._disk_tier.disk)

    def close(self) -> None:
        """Drop all that is kept and leave the model as it was. Idempotent. A `RuntimeWarning` names the conversations
        that the disk did not take, and another one those that were forgotten and that it did not remove.

        Raises:
            ConcurrentUseError: another thread is generating, or this one is: what it calls cannot close it.
            StoreInUseError: an `Engine` uses it. Nothing was changed.
        """
        lost: list[str] = []
        if not self.closed:
            if any(not engine.closed for engine in self.engines):
                raise StoreInUseError("An Engine uses this ConversationStore: close that first. Nothing was changed.")
            self._waker.stop()
            if not self._under_way.any:
                lost = self._flush()
            self._under_way.close()
        # What follows may be done twice: whatever cuts it short, the next `close` goes on.
        self._waker.close()  # before what it brings would have no owner
        if self._disk_tier is not None and not self._disk_tier.disk.closed:
            self._disk_tier.flush()  # of calls that have ended since
        self._hook.remove()
        self._generating.encoder.clear()
        self.caches.close()
        self._kept.close()
        tier, was_open = self._disk_tier, False
        if tier is not None:
            was_open = not tier.disk.closed
            tier.close()
        if self._own:
            self.memory.close()
        # Last: where warnings are errors, all is closed.
        if lost and tier is not None:
            warnings.warn(what_is_lost(lost, tier.disk), RuntimeWarning, stacklevel=2)
        if was_open and tier is not None and tier.disk.forgotten and not tier.disk.is_inherited:
            warnings.warn(what_is_left(tier.disk), RuntimeWarning, stacklevel=2)

    def __enter__(self) -> ConversationStore:
        self._under_way.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed or self.memory.closed:
            return "ConversationStore(closed)"
        return f"ConversationStore({', '.join([f'{len(self.names)} conversations', *self.memory.stats.tiers()])})"

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept, found and counted agrees. For tests and debugging."""
        self.memory.check_integrity()
        with self.memory.lock, self.memory.change:
            self._kept.check_integrity()
