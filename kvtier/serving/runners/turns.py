"""`Turns`: calls in one thread that pause for each other, as greenlets.

greenlet is optional, and imported here only. A call pauses in the midst of whatever called it: a model's forward, which
knows nothing of it. What torch keeps of a thread is not each greenlet's own: a call pauses only while that is as it was
when the calls began, and goes on where it is not. Variables of a context (`contextvars`) are each call's own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvtier.errors import UnsupportedError

T = TypeVar("T")

#: Times that a call which ends is told to, should it pause once more.
_TOLD = 8


def why_not() -> str:
    """Why there can be no turns; "": there can."""
    try:
        import greenlet  # noqa: F401
    except ImportError:
        return 'greenlet is not installed: pip install "kvtier[sub-batches]"'
    return ""


class Turns:
    """Runs calls in one thread, each until it pauses or ends, in order, again and again.

    Raises:
        UnsupportedError: greenlet is not installed.
    """

    def __init__(self) -> None:
        reason = why_not()
        if reason:
            raise UnsupportedError(reason)
        self._caller: Any = None
        self._began: tuple[Any, ...] = ()
        self._device = torch.device("cpu")

    def pause(self) -> None:
        """Let the others go on; returns when it is the caller's turn again. Not with a lock that another call takes."""
        if _of_thread(self._device) == self._began:
            self._caller.switch()

    def run(self, calls: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
        """Run calls that compute on a device. Returns what each returned.

        Raises:
            BaseException: what one of them raised; the others have ended then, as by an interrupt where they paused.
        """
        from greenlet import getcurrent, greenlet

        self._caller, self._device, self._began = getcurrent(), device, _of_thread(device)
        runs = [greenlet(call) for call in calls]
        for run in runs:
            run.gr_context = contextvars.copy_context()
        found: dict[int, T] = {}
        try:
            while len(found) < len(runs):
                for i, run in enumerate(runs):
                    if i not in found:
                        value = run.switch()
                        if run.dead:
                            found[i] = value
        finally:
            _end(runs)
            self._caller = None
        return [found[i] for i in range(len(runs))]


def _end(runs: Sequence[Any]) -> None:
    """Let calls that are paused end where they are."""
    for run in runs:
        for _ in range(_TOLD):
            if not run:  # not begun, or dead
                break
            run.throw()


def _of_thread(device: torch.device) -> tuple[Any, ...]:
    """What torch keeps for a thread, as far as a forward may change it."""
    kind = device.type
    stream = (torch.cuda.current_device(), torch.cuda.current_stream(device).cuda_stream) if kind == "cuda" else None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch._C._is_torch_function_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        stream,
    )
