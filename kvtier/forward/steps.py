"""A forward over all layers, seen from the cache: where it began, whether it ended, who runs it."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection
from functools import partial
from types import TracebackType

from kvtier.errors import ConcurrentUseError, InterruptedStepError
from kvtier.memory.access.change import undone

#: One state of a recurrent layer: (layer, kind, number).
RecurrentPart = tuple[int, str, int]
#: What a forward updates: an attention layer, or a recurrent state.
Part = int | RecurrentPart

#: Seconds between two looks at whether a thread has left a guard.
_PAUSE = 0.0002

_CUT_SHORT = (
    "A change of the cache was cut short, by Ctrl-C or an error in its middle, or another thread closes it. `reset()` "
    "it before using it again."
)


class Guard:
    """A context manager around a change. Written out, as it is entered once per layer and token.

    Args:
        met: makes the error for a thread that comes while another is inside.
        interrupted: called when a change is cut short by what is not an `Exception`.

    Attributes:
        broken: a change was cut short and did not undo itself.
        holder: under 0, the identifier of the thread that is inside: taken and signed in one step, so that a signal
            finds no lock without a holder.
    """

    __slots__ = ("_interrupted", "_met", "broken", "holder")

    def __init__(
        self, met: Callable[[], Exception] = ConcurrentUseError, interrupted: Callable[[], None] | None = None
    ) -> None:
        self._met = met
        self._interrupted = interrupted
        self.holder: dict[int, list[int]] = {}
        self.broken = False

    def __enter__(self) -> None:
        me = [threading.get_ident()]
        holder = self.holder.setdefault(0, me)
        if holder is not me:
            if holder == me:  # a signal came between two lines of this class
                raise InterruptedStepError(_CUT_SHORT)
            raise self._met()
        if self.broken:
            self.holder.clear()
            raise InterruptedStepError(_CUT_SHORT)
        self.broken = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A change that raises an error has undone itself. A signal may come anywhere: nothing is known after one.
        self.broken = error is not None and not undone(error)
        if self.broken and self._interrupted is not None:
            self._interrupted()
        self.holder.clear()

    def shut(self) -> None:
        """Wait until the other thread that is inside has left, for it reads what is about to be given back; then
        refuse whoever comes."""
        me = [threading.get_ident()]
        while (holder := self.holder.setdefault(0, me)) != me:
            if all(thread.ident != holder[0] for thread in threading.enumerate()):
                break  # a process that was forked meanwhile has no such thread
            time.sleep(_PAUSE)
        self.broken = True
        if holder is me:
            self.holder.clear()


class StepTracker:
    """Follows the updates of a forward and refuses what would mix two of them.

    A step begins when a part is updated that was updated before, and is complete when every part was that was in the
    first step. What cannot be distinguished from a finished forward is treated as one. Attention layers are announced
    before they change (`update`). So are recurrent states (`touch`), but for those that a model changes in place, which
    are found changed afterwards (`saw`).

    Threads: a forward belongs to the thread that began it. An update of another thread in its middle is refused before
    it changes anything, and so is a forward whose mask was made before another thread's forward began. If the refused
    thread has itself run forwards on this cache, each thread has read tokens of the other: the cache is *mixed*, and
    refuses every use by any thread until `reset`. Whole forwards may come from any thread, one after the other: a pool
    of workers that serves one conversation looks like that.

    Args:
        expected: attention layers that belong to every forward, where they are known in advance.
        lengths: gives the distinct numbers of tokens in the layers that hold any; once equal, they must stay so.
        interrupted: called when a change was cut short by what is not an `Exception`.

    Attributes:
        began: length of each updated layer before the step under way (or the last one); 0 for recurrent states.
        owner: identifier of the thread that began it; 0 before the first.
        count: steps begun since the cache was made or reset.
        ended_at: the last part of the step before.
        undoable: whether an unfinished step can be dropped by `crop`.
        pending: set while a recurrent layer may have been changed in place; looks at it and reports what it `saw`.
        guard: see `changing`.
        failed_at: the layer whose attention raised an error, or whose indexer lacks its tokens; None: none did, or it
            was repeated. Where no layer follows it, the forward did not finish, though all layers have its tokens.
        ordered: whether layers are updated in the order of their numbers.
        sometimes: layers that a forward updates, in that order, where it is given an image, and passes over where it
            is not (cross-attention).
        given_image: whether the forward that updates a layer now is given an image; None: its caller does not show it.
        with_image: whether the forward under way, or the last one, is known to be given one.
        even: whether the layers should hold equally many tokens.
        compare: whether something other than a single token for each layer may have changed lengths, since they were
            compared.
        inside: whether a thread, given by its identifier, is inside a forward with this cache now; where nobody
            knows, it is taken to have left.
    """

    def __init__(
        self,
        expected: frozenset[int] | None = None,
        lengths: Callable[[], Collection[int]] = frozenset,
        interrupted: Callable[[], None] | None = None,
    ) -> None:
        self._given = expected
        self._lengths = lengths
        self.even = self.ordered = True
        self.sometimes: frozenset[int] = frozenset()
        self.given_image: Callable[[], bool | None] = lambda: None
        self.with_image = False
        self.expected: frozenset[Part] | None = expected
        self.began: dict[Part, int] = {}
        self.ended_at: Part | None = None
        self.undoable = True
        self.pending: Callable[[], None] | None = None
        self.failed_at: int | None = None
        self.owner = 0
        self.count = 0
        self._torn = False
        self._mixed = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # those that ran a forward
        self._mask = threading.local()  # `count` of each thread when its mask was made
        self.compare = True
        self.inside: Callable[[int], bool] = lambda thread: False
        self._first: dict[type, int] = {}
        self._interrupted = interrupted
        self.guard = self._new_guard()
        #: Guards that a thread may still be inside.
        self._left: list[Guard] = []

    @property
    def complete(self) -> bool:
        """Whether no step is known to be unfinished. `settle` first."""
        if self._torn or self._ended_at_failure():
            return False
        return not self.began or self.expected is None or self.began.keys() >= self._due() or self._reached_end()

    def _due(self) -> frozenset[Part]:
        """What the step under way updates, as far as that is known."""
        return (self.expected or frozenset()) | (self.sometimes if self.with_image else frozenset())

    def _ended_at_failure(self) -> bool:
        """Whether nothing was updated behind a layer whose attention raised an error."""
        failed, last = self.failed_at, self._last()
        if failed is None:
            return False
        # A forward without an image reads what a layer of cross-attention holds, and does not update it.
        return last == failed or (failed in self.sometimes and isinstance(last, int) and last < failed)

    def _last(self) -> Part | None:
        """What was updated last."""
        return next(reversed(self.began), None)

    def _is_passed(self, layer: int) -> bool:
        """Whether the step under way has updated a layer behind this one."""
        last = self._last()
        return isinstance(last, int) and layer < last

    def _reached_end(self) -> bool:
        """Whether only layers before the last updated one are missing: the model passes them over.

        Models update layers in their order, so a step that breaks off leaves the layers behind some layer as they were.
        """
        if not self.ordered:
            return False
        missing = self._due() - self.began.keys()
        layers = [part for part in missing if isinstance(part, int)]
        updated = (part for part in self.began if isinstance(part, int))
        return len(layers) == len(missing) and max(updated, default=-1) > max(layers)

    def changing(self) -> Guard:
        """Guard one change of the cache. One thread at a time; what a signal cuts short stays refused until `reset`."""
        self.compare = True
        return self.guard

    def update(self, layer: int, length: int) -> bool:
        """Called before `layer`, now `length` tokens long, is updated. True if that begins a step.

        Raises:
            InterruptedStepError: the last step did not finish.
            ConcurrentUseError: another thread's step is under way.
        """
        if self.pending is not None:
            self.pending()
        if self._torn:
            raise self.interrupted()
        me = threading.get_ident()
        begins = not self.began or layer in self.began or (layer in self.sometimes and self._is_passed(layer))
        first = layer if layer in self.sometimes else self._first.setdefault(int, layer)
        if begins:
            # Then the last step is complete, and teaches nothing.
            whole = self.began.keys() == self.expected and self.failed_at is None and not self.with_image
            if not whole:
                self._check_complete()
            if layer != first:
                self._check_first(layer, first)
            # One token for each of all layers leaves them as even as they were.
            if self.compare or not self.even or not whole:
                self._check_even()
                self.compare = False
            if self.owner != me:
                self._check_mask()
            if not whole:
                self._learn()
            self._begin(me)
        elif self.owner != me:
            raise self._refused(overlap=True)
        elif (
            self.sometimes
            and layer not in self.sometimes
            and self.began.keys() <= self.sometimes
            and self.given_image() is False
        ):
            # Another forward than the one before, which ended among its first layers: this one passed those over.
            raise self.interrupted()
        elif (
            self.expected is not None
            and layer not in self.expected | self.sometimes
            and length == 0
            and any(self.began.values())
        ):
            raise InterruptedStepError(
                f"Layer {layer} is new to a cache whose other layers hold {max(self.began.values())} tokens: the first "
                "forward did not finish, or this is another model. `reset()` the cache."
            )
        if self.sometimes and not self.with_image:
            self.with_image = layer in self.sometimes or (begins and bool(self.given_image()))
        self.began[layer] = length
        return begins

    def touch(self, part: RecurrentPart) -> bool:
        """Called before a recurrent state is changed. True if that begins a step. Raises what `update` raises."""
        if self._torn:
            raise self.interrupted()
        begins = not self.began or part in self.began
        first = self._first.setdefault(tuple, part[0])
        if begins:
            self._check_complete()
            self._check_first(part[0], first)
            if self.owner != threading.get_ident():
                self._check_mask()
            self._learn()
            self._begin(threading.get_ident())
        elif self.owner != threading.get_ident():
            raise self._refused(overlap=True)
        elif self.expected is not None and part not in self.expected and self.knows_states():
            self.expected |= {part}  # so that this step stays unfinished
            raise InterruptedStepError(
                f"A {part[1]} state of layer {part[0]} is new to a cache that holds others: the first forward did not "
                "finish, or this is another model. `reset()` the cache."
            )
        self.began[part] = 0
        return begins

    def saw(self, part: RecurrentPart, owner: int) -> bool:
        """Called after thread `owner` changed a recurrent state in place, in the forward under way or in the last.

        Never raises: the next announcement raises if that mixed two forwards. True if it began a step.
        """
        begins = not self.began or part in self.began
        if begins:
            if not self.complete:
                self._torn = True
                return False
            self._first.setdefault(tuple, part[0])
            self._learn()
            self._begin(owner)
        self.began[part] = 0
        return begins

    def mask_made(self) -> None:
        """Called when a thread asks for the lengths that its next forward sees. Raises where forwards were mixed."""
        if self._mixed:
            raise self.interrupted()
        self._mask.count = self.count

    def undo(self, part: Part) -> None:
        """The update announced last did not happen."""
        self.began.pop(part, None)

    def tear(self) -> None:
        """An update failed half-way and cannot be undone: nothing but `reset` is possible."""
        self._torn = True

    def settle(self) -> None:
        """Look at what may have been changed in place."""
        if self.pending is not None:
            with self.guard:
                self.pending()

    def check_goes_on(self) -> None:
        """Raise if forwards were mixed, or another thread's step is under way."""
        if self._torn:
            raise self.interrupted()
        if self.owner != threading.get_ident() and not self.complete:
            self._check_complete()

    def _begin(self, owner: int) -> None:
        self.ended_at = self._last()
        self.began, self.failed_at, self.with_image = {}, None, False
        self.count += 1
        if self.owner != owner:
            self.owner = owner
            self._threads.add(threading.current_thread())

    def _check_mask(self) -> None:
        """Raise where another thread began a forward after this one made its mask."""
        made = vars(self._mask).pop("count", self.count)
        if made != self.count:
            raise self._refused(overlap=True)

    def _check_first(self, layer: int, first: int) -> None:
        if layer != first:
            raise ConcurrentUseError(
                f"A forward goes on at layer {layer}, but the cache was cropped, reordered or reset since it began. "
                "Run it again from its first layer."
            )

    def knows_states(self) -> bool:
        """Whether a forward has updated recurrent states to its end."""
        return any(type(part) is tuple for part in self.expected or ())

    def check_sound(self) -> None:
        """Raise if a change was cut short, or forwards of two threads were mixed."""
        if self._mixed:
            raise self.interrupted()
        if self.guard.broken:
            raise InterruptedStepError(_CUT_SHORT)

    def check_whole(self) -> None:
        """Raise if a step is known to be unfinished, or a change was cut short."""
        self.check_sound()
        self.settle()
        self._check_complete()

    def break_off(self) -> None:
        """A change of some layers failed in others: nothing but `reset` is possible."""
        self.guard.broken = True

    def shut(self) -> None:
        """What the cache holds is about to be given back: until `reset`, no thread reads it or adds to it."""
        self._left.append(self.guard)
        self.guard = self._new_guard()
        self.break_off()  # whoever comes finds this one, so that the thread inside the other one is soon out
        for guard in reversed(self._left.copy()):
            guard.shut()
            # Behind it: who is called again after an interrupt waits for the same thread. Another one may wait, too.
            with contextlib.suppress(ValueError):
                self._left.remove(guard)

    def _check_complete(self) -> None:
        if not self.complete:
            raise self._refused(self.inside(self.owner)) if self._owned_by_another() else self.interrupted()

    def end(self) -> None:
        """Whatever was under way is over: the rows or the length changed. A forward that goes on is refused."""
        if self._ran_whole() and self.failed_at is None:
            self.even = len(self._lengths()) <= 1
        self._learn()
        self.began, self.failed_at, self.with_image = {}, None, False

    def _learn(self) -> None:
        if self.began and not self.began.keys() <= (self.expected or frozenset()):
            self.expected = ((self.expected or frozenset()) | self.began.keys()) - self.sometimes

    def _check_even(self) -> None:
        even = len(self._lengths()) <= 1
        if self.even and not even and not self._ran_whole():
            raise InterruptedStepError(
                f"The layers hold different numbers of tokens, {sorted(self._lengths())}: an earlier forward did not "
                "finish. `reset()` the cache; and for a model with cross-attention, make it with the model's config."
            )
        self.even = even

    def _ran_whole(self) -> bool:
        """Whether the last forward updated all layers. Those of cross-attention have a length of their own, from the
        first forward on (Mllama)."""
        return self._given is not None and self.began.keys() >= self._given

    def reset(self) -> None:
        """Nothing is under way and nothing is broken."""
        if not self._owned_by_another():
            self._first = {}  # else a forward of that thread may go on, and must be noticed
        self.began, self.failed_at, self.with_image = {}, None, False
        self.count += 1  # a mask that was made before does not fit what comes
        self.pending = None
        self._torn = self._mixed = False
        self.owner = 0
        self._threads.clear()
        vars(self._mask).pop("count", None)
        self.expected = self._given
        self.even = True
        self.guard = self._new_guard()

    def _new_guard(self) -> Guard:
        return Guard(partial(self._refused, True), self._interrupted)

    def interrupted(self) -> InterruptedStepError | ConcurrentUseError:
        """The error for a step that did not finish."""
        if self._mixed:
            return ConcurrentUseError(
                "Two threads ran forwards on one TieredKVCache at a time, so that each read tokens of the other. What "
                "it holds belongs to neither: `reset()` it, and give each thread its own cache."
            )
        if not self.undoable:
            return InterruptedStepError(
                "The last forward did not finish, and layers with a recurrent state, or of a class that the model "
                "brings, cannot undo their part of it. "
                "`reset()` the cache."
            )
        where = f"updated {len(self.began)} of {len(self._due())} layers"
        if self._ended_at_failure():
            where = f"failed in layer {self.failed_at}"
        return InterruptedStepError(
            f"The last forward {where} and did not finish. `crop(0)` drops it and keeps what was there before; "
            "`reset()` empties the cache."
        )

    def _owned_by_another(self) -> bool:
        owner = self.owner
        return owner != threading.get_ident() and any(thread.ident == owner for thread in threading.enumerate())

    def _refused(self, overlap: bool) -> InterruptedStepError | ConcurrentUseError:
        """The error for a thread that comes between another's updates. `overlap`: that one is known to go on."""
        if overlap and threading.current_thread() in self._threads:
            self._torn = self._mixed = True
            return self.interrupted()
        return ConcurrentUseError(
            "A second thread updates this TieredKVCache while a forward of another thread is under way. Give each "
            "thread its own cache. `crop(0)` drops the unfinished step."
        )
