"""`Prefixes`: what earlier requests have computed, for later ones to begin with.

Each request begins with the longest beginning that is kept of its prompt, to the token, and what it computes is kept
in turn: when its prompt is there, when it gives up its blocks, and when it ends (Pensieve, sections 4.2 and 4.3; blocks
are shared as in vLLM). What is kept takes no room that a request needs: it goes by an eviction policy, ends first.

A request whose prompt begins as one that is being computed waits until that has computed what they share: computed
once, it serves both. Which of several is computed first is the scheduler's choice: nobody waits for one that queues,
nor for one that has begun and has no part in the step, for others go before it.

A model with recurrent states goes on from copies of them only. They are made before the last token of a prompt, which
is then computed with those that decode, every `SPACING` tokens of a longer one, and where a request ends or gives up
its blocks: the next turn of a conversation begins where the last one ended. Some models go on from a state by one token
at a time only: then a copy is used where that is sooner than to begin again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

from kvtier.conversation.index import WIDTH, PrefixIndex, common, packed
from kvtier.conversation.kept.kept import SPACING, Entry, Kept
from kvtier.conversation.saved.wake import Wake
from kvtier.conversation.store import ConversationStore
from kvtier.errors import BudgetError, ConfigError, CorruptionError, KVTierError, TransferError
from kvtier.eviction.policies.names import policy_of
from kvtier.forward.sub_batch import PackedSequence
from kvtier.hf.models import generation as of
from kvtier.hf.models.identity import dependence
from kvtier.scheduling.job import Job
from kvtier.serving.costs import Costs
from kvtier.serving.request import Request
from kvtier.serving.runners.packed import PackedRunner
from kvtier.serving.runners.ragged import RaggedRunner

_LOG = logging.getLogger("kvtier.serving")

#: Tokens that a prompt must share with one that is being computed to wait for it.
WORTH_WAITING = 64
#: More bytes than there are.
_ALL = 1 << 62


def prefixes_of(
    model: Any, runner: Any, store: ConversationStore | None, costs: Costs, state_budget: int
) -> Prefixes | None:
    """The prefixes of an engine: those of a store, or of its own; None where its runner cannot go on with blocks, or
    there is no room for copies of states that it goes on with.

    Args:
        costs: of steps.
        state_budget: bytes of the engine's own copies of states.

    Raises:
        ConfigError: a store of another model or memory.
    """
    if store is not None and (of.inner(store.model) is not of.inner(model)):
        raise ConfigError("store= is of another model.")
    if not isinstance(runner, (PackedRunner, RaggedRunner)):
        return None
    stateful = isinstance(runner, RaggedRunner)
    if store is not None and not store.positions_vary:
        return Prefixes(model, runner, store.kept, store, costs, stateful=stateful)
    if stateful and not state_budget:
        return None
    return Prefixes(model, runner, _own(runner, state_budget), None, costs, stateful=stateful)


def _own(runner: PackedRunner | RaggedRunner, state_budget: int) -> Kept:
    def new_cache() -> Any:
        raise AssertionError("rows of an engine are not padded")

    return Kept(runner.forward.memory, new_cache, policy_of(None), state_budget)


def try_to_keep(keep: Callable[[Request], None], request: Request) -> None:
    """What cannot be kept of a request is computed again where it is asked for, and fails nothing."""
    try:
        keep(request)
    except AssertionError:
        raise  # of no request: what is counted does not agree
    except Exception as error:
        _LOG.warning("What request %r has computed is not kept: %s", request.name, error)


class _Follows(NamedTuple):
    """What a request waits for.

    Attributes:
        other: that computes what this one begins with.
        tokens: of `other`, behind which this one has no more to wait for.
    """

    other: Request
    tokens: int


class Prefixes:
    """What is kept of sequences, for one runner. One thread at a time.

    Args:
        model: of Transformers.
        runner: that continues what is kept.
        kept: of the store, or the engine's own.
        store: that has it; None: it is the engine's own.
        costs: of steps.
        stateful: whether it is continued at copies of states only.

    Attributes:
        seen: what the model is, as far as it was looked at in this change of the requests; None: it was not. Whoever
            begins a change sets that.
        changes: times that a step found it to be another one than before: with other adapters, say. (Those of weights
            are counted by `Kept.epoch`.)
    """

    def __init__(
        self,
        model: Any,
        runner: PackedRunner | RaggedRunner,
        kept: Kept,
        store: ConversationStore | None,
        costs: Costs,
        *,
        stateful: bool,
    ) -> None:
        self._model = model
        self._runner = runner
        self._costs = costs
        self._stateful = stateful
        self._forward = runner.forward
        self._memory = runner.forward.memory
        self._kept = kept
        self._store = store
        self._weights = dependence.weights_version(model)
        self.seen: dependence.Depends | None = None
        self.changes = 0
        depends = dependence.depends(model)
        self._computes = depends.computed_as, depends.training
        self._adapted = depends.adapted
        self._modes = dependence.modes(model, self._adapted)
        costs.loads = self._loads
        # Prompts that are being computed. None of them waits for another one.
        self._coming: PrefixIndex[Request] = PrefixIndex()
        # Of these, those that are about to begin.
        self._next: set[Request] = set()
        self._follows: dict[Request, _Follows] = {}
        self._followers: dict[Request, list[Request]] = {}
        # Those that wait no longer for one that had no part in a step: for which, and how far that was.
        self._passing: dict[Request, tuple[Request, int]] = {}
        # What is read from the disk, and until when a request waits for that.
        self._wakes: dict[Request, tuple[Wake, float]] = {}
        # What waits on the host for its request.
        self._swapped: dict[Request, Entry] = {}
        # Those for whose sake entries are held, or may be.
        self._holding: set[Request] = set()

    def key(self, salt: Hashable) -> Hashable:
        """What keys and values depend on besides tokens, and who may share them. What a part of the model in training
        mode gives may differ each time: then it is nobody else's."""
        depends = self._look()
        key = depends.computed_as, object() if depends.training else salt
        return key if self._store is None else self._store.caches.forms(key)[-1]

    def _loads(self) -> tuple[float, float] | None:
        """What loading from the store's disk takes, see `Costs`."""
        tier = None if self._store is None else self._store.disk_tier
        return None if tier is None else tier.learned(self._forward.token_bytes())

    def _look(self) -> dependence.Depends:
        """What the model is now. Drops everything if its weights are others than before. A walk over all modules takes
        longer than most kernels: there is one in each change of the requests, whatever their number."""
        if self.seen is None:
            self.seen = dependence.depends(self._model) if self._store is None else self._store.check_weights()
            if self.seen.weights != self._weights:
                if self._store is None:
                    self.clear()
                self._weights = self.seen.weights
        return self.seen

    def _look_and_count(self) -> None:
        """The same, in the thread that runs the steps: others may be in an autocast of their own."""
        depends = self._look()
        self._adapted = depends.adapted
        computes = depends.computed_as, depends.training
        if computes != self._computes:
            self._computes = computes
            self.changes += 1

    def watch(self) -> None:
        """A step begins. What was switched since the last one may be switched back before any request comes or
        ends."""
        modes = dependence.modes(self._model, self._adapted)
        if modes != self._modes:
            self._modes = modes
            self._look_and_count()

    # Coming

    def comes(self, request: Request, until: float) -> None:
        """A request was added: see whether what it begins with is kept, or is on the disk.

        Args:
            until: when it would be computed, if it were not loaded. It waits for no longer than that.
        """
        request.key = self.key(request.salt)
        self._look_up(request, packed(request.ids))
        if self._store is not None and self._store.disk_tier is not None:
            wake = self._store.bring(request.key, packed(request.ids))
            if wake.reads:
                self._wakes[request] = wake, until

    def hold_back(self, requests: Sequence[Request], computed: Collection[Job]) -> bool:
        """Of requests that are about to begin, in this order, let those wait whose beginning another one computes, or
        one before them here. Whether there are any: then it is to be decided again who begins.

        Args:
            computed: jobs that have a part in the step.
        """
        held = [request for request in requests if self._holds_back(request, computed)]
        if not held:
            for each in self._next.difference(requests):  # it was decided otherwise
                self._coming.remove(each)
                self._release(each, ends=True)
            self._next.clear()
            for each in [x for x in self._followers if x.job not in computed]:  # others go before it
                self._passing |= dict.fromkeys(self._followers[each], (each, each.job.cached))
                self._release(each, ends=True)
        return bool(held)

    def _holds_back(self, request: Request, computed: Collection[Job]) -> bool:
        if request.alone or request in self._coming:
            return False
        ids = packed(request.ids)
        shared, other = self._coming.find(request.key, ids)
        if other is not None and (tokens := self._useful(shared, other)) >= WORTH_WAITING:
            # Perhaps it has no part only because of this request: that shows when this one has none.
            passed = self._passing.get(request) == (other, other.job.cached)
            goes_on = not passed or other in self._next or other.job in computed
            if other.job.cached >= tokens or not goes_on:
                self._share(other)
            self._look_up(request, ids)
            if (
                other.job.cached < tokens
                and goes_on
                and tokens - request.job.swapped >= WORTH_WAITING
                and other.job.priority >= request.job.priority
            ):
                self._follows[request] = _Follows(other, tokens)
                self._followers.setdefault(other, []).append(request)
                return True
        self._coming.add(request.key, ids, request)
        self._next.add(request)
        return False

    def _useful(self, shared: int, other: Request) -> int:
        """Of tokens that a request shares with one that is being computed, those that it can begin with then."""
        last = len(other.ids) - 1
        if not self._stateful:
            return shared
        if shared >= last:
            return last
        return shared - shared % SPACING if self._runner.chunked else 0  # else a prompt is not computed in parts

    def waits(self, request: Request, now: float) -> bool:
        """Whether another request is to compute what this one begins with, or it is being loaded."""
        if request in self._wakes:
            wake, until = self._wakes[request]
            if wake.reads and now < until:
                return True
            del self._wakes[request]
            self._look_up(request, packed(request.ids))
        awaited = self._follows.get(request)
        if awaited is not None and awaited.other.job.cached >= awaited.tokens:
            self._share(awaited.other)
            self._release(awaited.other)
        return request in self._follows

    def _share(self, request: Request) -> None:
        """Keep what a request has computed of its prompt so far, between two steps: others begin with a part of it.
        Copies of states are made on the way (see `computed`): one at this place would be of no use to them."""
        if not self._stateful:
            try_to_keep(self.keep, request)

    def _release(self, request: Request, *, ends: bool = False) -> None:
        """Who waits for a request waits no longer, as far as it has computed what they share, or computes no more."""
        for each in self._followers.pop(request, ()):
            if ends or request.job.cached >= self._follows[each].tokens:
                del self._follows[each]
                self._look_up(each, packed(each.ids))
            else:
                self._followers.setdefault(request, []).append(each)

    def there(self, request: Request) -> None:
        """A request's prompt is computed, or it has given up its blocks, or ended: nobody waits for it any more."""
        self._unswap(request)
        self._passing.pop(request, None)
        if request in self._coming:
            self._coming.remove(request)
        wake, _ = self._wakes.pop(request, (None, 0.0))
        if wake is not None:
            wake.cancel()
        awaited = self._follows.pop(request, None)
        if awaited is not None and request in self._followers.get(awaited.other, ()):
            self._followers[awaited.other].remove(request)
        self._release(request, ends=True)

    def _look_up(self, request: Request, ids: bytes) -> None:
        """What a request that waits is expected to begin with: in all, and of that what takes no more room."""
        job = request.job
        with self._memory.lock, self._memory.change:
            job.swapped, entry = self._find(request.key, ids)
            if entry is None:
                job.reusable = 0
                return
            job.reusable = min(self._forward.shared(entry.sequence), job.swapped)

    def _find(self, key: Hashable, ids: bytes) -> tuple[int, Entry | None]:
        """The longest beginning that is kept and can be gone on from, which lacks at least the last token: its scores
        are wanted. Holds the lock."""
        if self._stateful:
            length, entry = next(self._kept.states_of(key, ids[:-WIDTH]), (0, None))
            whole = len(ids) // WIDTH
            if entry is not None and not self._runner.chunked and not self._costs.one_by_one(whole - length, whole):
                return 0, None
            return length, entry
        length, entry = self._kept.find(key, ids)
        if entry is not None:
            length = min(length, entry.sequence.length, common(entry.ids, ids), len(ids) // WIDTH - 1)
        return (length, entry) if length > 0 else (0, None)

    # Begin, keep

    def begin(self, request: Request) -> int:
        """Let a request that has no blocks begin with what is kept of it. The tokens that are there then."""
        if request.alone:
            return 0
        self._look_and_count()
        # The model may be another one than when the request came.
        request.key, request.changes, request.epoch = self.key(request.salt), self.changes, self._kept.epoch
        ids = packed(request.ids)
        with self._memory.lock, self._memory.change:
            length, entry = self._find(request.key, ids)
            if entry is None:
                return 0
            states = entry.states[length] if self._stateful else {}
            self._hold(entry, request)
        try:
            sequence = self._go_on(request, entry, length)
            if sequence is not None:  # at once: it is given up with the request, whatever fails
                request.sequence = self._runner.go_on(sequence, states)
        except CorruptionError:
            with self._memory.lock, self._memory.change:
                self._kept.drop_corrupt([entry])
            sequence = None
        except BudgetError:
            sequence = None
        finally:
            self._let_go(entry, request)
            self._unswap(request)
        if sequence is None:
            return 0
        if states and sequence.length < length:  # its end has gone meanwhile
            self._runner.remove(request.sequence)
            request.sequence = None
            return 0
        with self._memory.lock, self._memory.change:
            self._kept.use([entry], [sequence.length])
        return sequence.length

    def _go_on(self, request: Request, entry: Entry, length: int) -> PackedSequence | None:
        """A sequence that goes on with so many tokens of an entry; None: it has none any more. What has left the device
        for the request's sake comes back first."""
        with self._memory.lock, self._memory.change:
            if request in self._swapped:
                self._kept.parked.promote([entry.sequence], _ALL)
        return self._forward.follow(self._kept.parked, entry.sequence, length)

    def swap(self, request: Request) -> bool:
        """What is kept of a request that has given up its sequence leaves the device, and stays on the host until the
        request begins again. Whether it does: else it is kept as all else is."""
        with self._memory.lock, self._memory.change:
            length, entry = self._find(request.key, packed(request.ids))
            if entry is None or length < request.job.cached:
                return False
            try:
                self._kept.parked.leave(entry.sequence)
            except (BudgetError, TransferError):
                return False
            self._swapped[request] = entry
            self._hold(entry, request)
        return True

    def _unswap(self, request: Request) -> None:
        entry = self._swapped.pop(request, None)
        if entry is not None:
            self._let_go(entry, request)

    def _hold(self, entry: Entry, request: Request) -> None:
        """What a request begins with stays. Holds the lock."""
        self._holding.add(request)  # first: what is cut short is found
        self._kept.hold([entry], request)

    def _let_go(self, entry: Entry, request: Request) -> None:
        """The opposite."""
        with self._memory.lock, self._memory.change:
            self._kept.release([entry], request)
        if request not in self._swapped:
            self._holding.discard(request)

    def part(self, job: Job, tokens: int) -> int:
        """How many of the next tokens of a request are computed in one part: up to where its states are copied."""
        if not self._stateful or job.left == 1:
            return tokens
        if not self._runner.chunked:
            return 1 if job.cached else job.left - 1
        return min(tokens, job.left - 1, SPACING - job.cached % SPACING)

    def computed(self, request: Request) -> None:
        """A part of a request's prompt was computed: what others can begin with is kept, and who waits for it waits no
        longer."""
        job, left = request.job, request.job.left
        end = left == 1 if self._stateful else not left
        if end or (self._stateful and left and not job.cached % SPACING):
            self.keep(request)
        if end or not left:
            self.there(request)

    def keep(self, request: Request) -> None:
        """Keep what a request has computed so far."""
        if request.sequence is None or request.alone:
            return
        sequence = self._runner.kv(request.sequence)
        if not sequence.length:
            return
        self._look_and_count()
        if request.changes != self.changes:  # other adapters, say, have computed a part of it
            return
        ids = packed(request.ids[: sequence.length])
        states = self._runner.states(request.sequence) if self._stateful else {}
        with contextlib.suppress(KVTierError):
            entry = self._kept.add(
                request.key,
                ids,
                functools.partial(self._forward.park, sequence=sequence),
                {sequence.length: states} if states else {},
                epoch=request.epoch,
            )
            if entry is not None and self._store is not None and (tier := self._store.disk_tier) is not None:
                request.job.saved = tier.save(entry)

    def reset(self) -> None:
        """After an interrupt: no request is known, nor holds anything, and what is the engine's own is dropped."""
        self._coming = PrefixIndex()
        self._next.clear()
        self._follows.clear()
        self._followers.clear()
        self._passing.clear()
        self._wakes.clear()
        self._swapped.clear()
        with self._memory.lock, self._memory.change:
            for request in self._holding:
                self._kept.release(self._kept.entries.values(), request)
        self._holding.clear()
        if self._store is None:
            self.clear()

    def clear(self) -> None:
        """Drop all that is kept."""
        with self._memory.lock, self._memory.change:
            self._kept.clear()

    def close(self) -> None:
        """The runner is closed: drop what is the engine's own."""
        if self._store is None:
            self._kept.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept, found and counted agrees. For tests and debugging."""
        assert not self._next, "who was to begin has not begun"
        for request, (other, tokens) in self._follows.items():
            assert request in self._followers[other]
            assert other.job.running, "a request waits for one that queues"
            assert tokens <= len(other.ids), "a request waits for more than is computed"
        with self._memory.lock, self._memory.change:
            self._kept.check_integrity()
