"""`Loop`: runs an engine's steps, in a thread of its own or in whoever asks for one."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from kvtier.ends import ends_elsewhere, join, process_ends, retry_on_interrupt, runs
from kvtier.errors import ConcurrentUseError, UnsupportedError
from kvtier.forks import heed, inherited
from kvtier.kernels import launch
from kvtier.memory.tiered import TieredMemory
from kvtier.serving.requests import Requests
from kvtier.serving.steps.step import StepRunner

_LOG = logging.getLogger("kvtier.serving")

#: Of engines that there are.
_loops: weakref.WeakSet[Loop] = weakref.WeakSet()

#: Seconds between two looks whether an engine without requests is still there.
_LOOK = 5.0
#: Seconds after which who waits for another thread's step looks itself: an interrupt may have come before it was woken.
_UNTOLD = 1.0
#: What calls listeners and criteria; by id, for a code object is hashed with all that it has.
_INSIDE = frozenset(
    id(function.__code__) for function in (StepRunner.step, Requests.recover, Requests.give_up_all, Requests.cancel_all)
)


class Loop:
    """Runs steps, one at a time.

    Args:
        requests: that there are.
        steps: which computes them.
        memory: that they are computed in.
        device: says where the model takes its inputs.
        user: who adds requests; when it is garbage, the thread ends once there is nothing to do.

    Attributes:
        stepping: held during a step.
    """

    def __init__(
        self,
        requests: Requests,
        steps: StepRunner,
        memory: TieredMemory,
        device: Callable[[], torch.device],
        user: weakref.ref[Any],
    ) -> None:
        self._requests = requests
        self._device = device
        self._user = user
        self._steps = steps
        self._memory = memory
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.stepping = threading.RLock()
        heed(self)
        _loops.add(self)
        _end_with_process()

    def forked(self) -> None:
        """As of `Inherited`: a thread that is not here may be at a step."""
        before, self.stepping = self.stepping, inherited(self.stepping, threading.RLock)
        if self.stepping is not before:
            self._requests.books.interrupted = True

    @property
    def alive(self) -> bool:
        """Whether that thread runs."""
        return runs(self._thread)

    def step(self) -> bool:
        """Compute one step, in the caller's thread. Whether there was anything to do.

        Raises:
            ConcurrentUseError: another thread is at a step, or this one is: a listener or a criterion asks.
        """
        self.check_outside()
        if not self.stepping.acquire(blocking=False):
            _check_process()
            raise ConcurrentUseError("Another thread runs this engine's steps.")
        try:
            _check_process()
            return self._own_step()
        finally:
            self.stepping.release()
            self._tell()

    def run_until(self, there: Callable[[], bool], end: float | None = None) -> bool:
        """Wait until what is waited for is there, and compute steps where no other thread does. Whether it is there.

        Args:
            there: asked under the lock, whenever something may have changed.
            end: when to give up, of `time.monotonic`; None: never.

        Raises:
            ConcurrentUseError: a listener or a criterion asks, for which the step waits.
        """
        self.check_outside()
        lock = self._requests.lock
        while True:
            try:
                with lock:
                    if there():
                        return True
                    _check_process()
                    left = math.inf if end is None else end - time.monotonic()
                    if left <= 0:
                        return False
                    # Tried under the lock: who steps now tells of its end behind the wait.
                    stepping = not self.alive and self.stepping.acquire(blocking=False)
                    if not stepping:
                        lock.wait(min(left, _UNTOLD))
                if stepping:
                    _check_process()
                    self._own_step()
            finally:
                try:
                    self.stepping.release()  # first: also where an interrupt came as it was taken
                except RuntimeError:
                    pass  # it was not
                else:
                    self._tell()

    def _own_step(self) -> bool:
        """One step, in a thread that asks for it."""
        try:
            return self._step()
        except BaseException as error:
            self._cut_short(error)
            raise

    def _tell(self) -> None:
        """Another thread may step: who waits for one hears of it."""
        with self._requests.lock:
            self._requests.lock.notify_all()

    def _step(self) -> bool:
        """Compute one step, in a thread whose current device need not be the model's, nor its stream that of whoever
        has added the requests: what a model launches by itself, as kernels of other packages, goes to the current one,
        and reads what is being made on that stream."""
        with launch.on(self._device()):
            with self._memory.lock:
                self._memory.follow()
            return self._steps.step()

    def start(self) -> None:
        """Run steps in a thread whenever there is something to do. Nothing, if it runs; one that ends is waited for.

        Raises:
            UnsupportedError: the model is divided over processes.
            ConcurrentUseError: a listener or a criterion asks, for which the thread that ends waits.
        """
        requests = self._requests
        if self._steps.divided:
            raise UnsupportedError(
                "The model is divided over processes, in each of which a thread would begin steps at another time: let "
                "`generate_batch`, `wait`, `stream` or `step` compute, called in all of them in the same order."
            )
        while True:
            with requests.lock:
                requests.check_open()
                ending = self._thread
                if not runs(ending):  # it was never started, or has ended by itself
                    if process_ends():  # whoever waits computes
                        return
                    self._stopping = False
                    self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
                    _end_with_process()
                    self._thread.start()
                    return
                if not self._stopping:
                    return
            self.check_outside()
            join(ending)

    def stop(self) -> None:
        """End the thread after the step that it is at. Requests stay where they are.

        Raises:
            ConcurrentUseError: a listener or a criterion asks, for which the step waits.
        """
        self.check_outside()
        lock = self._requests.lock
        with lock:
            thread, self._stopping = self._thread, True
            lock.notify_all()
        join(thread)
        with lock:
            if self._thread is thread:  # and none that was started since
                self._thread = None
            lock.notify_all()

    def check_outside(self) -> None:
        """Raise `ConcurrentUseError` in the midst of a step of this thread's, or of the end of requests. What was
        interrupted is on no stack."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if id(frame.f_code) in _INSIDE and frame.f_locals["self"] in (self._steps, self._requests):
                raise ConcurrentUseError(
                    "What an engine calls, a listener or a stopping criterion, asks for a step, or for the end of the "
                    "engine: it may add requests and cancel them. Let another thread do the rest."
                )
            frame = frame.f_back

    def _run(self) -> None:
        requests = self._requests
        while True:
            with requests.lock:
                while not self._stopping and not requests.running and not requests.waiting:
                    if self._user() is None:
                        return
                    requests.lock.wait(_LOOK)
                if self._stopping:
                    return
            with self.stepping:
                if requests.closed:  # meanwhile: there is nothing to do, and nobody to tell
                    return
                try:
                    self._step()
                except Exception as error:
                    # A fault of the engine's own: whoever waits is told, and the loop goes on with whatever comes.
                    _LOG.exception("A step failed.")
                    self._give_up_all(error)
                    self._recover()
                except BaseException as error:
                    # No fault, but an end, and nobody else would tell those who wait.
                    _LOG.exception("The engine's thread ends.")
                    self._give_up_all(error)
                    raise

    def _cut_short(self, error: BaseException) -> None:
        """A step has raised, at whatever place: what it has changed by then may be half of what belongs together. The
        next one repairs it."""
        self._requests.books.interrupted = True
        if not isinstance(error, Exception):
            self._memory.recovery.cut_short()

    def _give_up_all(self, error: BaseException) -> None:
        self._cut_short(error)
        with self._requests.lock:
            self._requests.give_up_all(error)

    def _recover(self) -> None:
        """Give back what those had who were given up: a next step may be long in coming."""
        try:
            with self._requests.lock, self._requests.change:
                self._requests.recover()
        except Exception:
            _LOG.exception("A step that failed was not repaired; the next one tries again.")


def _end_with_process() -> None:
    """What was registered last ends first: steps end before what they use, as it is by now."""
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


@retry_on_interrupt
def _stop_all() -> None:
    """The process ends and an engine was not closed: the step that a thread is at is waited for, and requests are not
    finished. A thread that Python ends within torch's code would abort the process."""
    for loop in list(_loops):
        if loop.alive:  # in a process that was forked it is not
            loop.stop()
        with loop.stepping:  # of a thread that asked for a step
            pass


def _check_process() -> None:
    """Raise `SystemExit` in the other threads of a process that ends, as Python will: one that waits for an engine's
    thread would step in its place. The thread in which it ends may ask for steps, as from `atexit`."""
    if ends_elsewhere():
        raise SystemExit
